"""Two FSDP2 ranks load a model and watch their memory; run by test_loading under torchrun. argv: directory.

Each rank prints one line of JSON: how far its own memory rose (mapped files are not counted), and what it read.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from learner.checkpoint.model_files import ModelFiles
from learner.model.adapter.lora import add_adapter
from learner.model.critic import build_critic
from learner.model.policy import load_policy
from learner.ranks.mesh import Ranks
from learner.supervised.methods import load_reward_network
from streamrl.config.schema import CriticConfig, CriticKind, LearnerConfig, LoraConfig

WIDTH, NUM_LAYERS = 512, 12  # 8 MiB a layer in float32


def own_mib() -> float:
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


class Watch(TorchDispatchMode):
    """The most memory that was held right after an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.peak = own_mib()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, own_mib())
        return result


def main() -> None:
    torch.set_num_threads(1)
    ranks, folder = Ranks.start("cpu", timeout_s=60), Path(sys.argv[1])
    config = LlamaConfig(
        vocab_size=128, hidden_size=WIDTH, intermediate_size=2 * WIDTH * 341 // 512, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=128,
    )
    if ranks.rank == 0:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
        small = LlamaConfig(**{**config.to_dict(), "hidden_size": 64, "head_dim": 8, "num_hidden_layers": 2})
        LlamaForCausalLM(small).save_pretrained(folder / "small")
    ranks.barrier()
    load_policy(folder / "small", ranks=ranks)  # what loading imports and keeps for good
    read, fill = [], ModelFiles.fill

    def counted(files: ModelFiles, model: torch.nn.Module) -> None:
        before = files.nbytes_read
        fill(files, model)
        read.append(files.nbytes_read - before)

    ModelFiles.fill = counted
    with Watch() as watch:
        policy = load_policy(folder / "model", ranks=ranks)
    found = {
        "rank": ranks.rank, "extra_mib": watch.peak - watch.before, "read_mib": read[-1] / 2**20,
        "file_mib": sum(p.numel() for p in policy.parameters()) * 2 / 2**20,
    }
    critic = build_critic(
        CriticConfig(kind=CriticKind.model), "gae", policy, folder / "model", num_steps=1, dtype=torch.float32,
        ranks=ranks,
    )
    found["critic_read_mib"] = read[-1] / 2**20
    found["critic_file_mib"] = sum(p.numel() for p in critic.module.decoder.parameters()) * 2 / 2**20
    adapted = load_policy(folder / "model", ranks=ranks, adapt=partial(add_adapter, config=LoraConfig(rank=2), seed=0))
    assert sum(p.requires_grad for p in adapted.parameters()) == 2 * 7 * NUM_LAYERS
    found["lora_read_mib"] = read[-1] / 2**20
    scores = load_reward_network(
        folder / "model", LearnerConfig(), ranks, dtype=torch.float32, gradient_checkpointing=False
    )
    found["reward_read_mib"] = read[-1] / 2**20
    assert not any(p.is_meta for p in scores.parameters())
    print(json.dumps(found), flush=True)
    ranks.barrier()
    ranks.close()


if __name__ == "__main__":
    main()
