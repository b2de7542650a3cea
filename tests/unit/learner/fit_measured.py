"""What a learner rank's resident memory really is, to be compared with the estimate; real gloo ranks, in forks.

    fit_measured.py FOLDER MODELS VARIANTS RANKS    what rank 0 grows by at the peak of its second step, for each

Every tensor has pages of its own (`MALLOC_MMAP_THRESHOLD_`), so the resident size follows what tensors hold.
"""

import gc
import json
import os
import subprocess
import sys
import traceback
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from learner.data.trajectories import Trajectory
from learner.fit.estimate import job_of
from learner.model.adapter.lora import add_adapter
from learner.model.networks import Networks
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import load_policy
from learner.objective.objective import Objective
from learner.ranks.mesh import Ranks
from learner.trainer import Trainer, TrainerSettings
from streamrl.config.load import load_config
from streamrl.config.schema import AdvantageConfig, Config, LossConfig
from tests.flow.processes import free_port
from tests.kit.learning import plan_of

SIZES: dict[str, Any] = dict(
    vocab_size=6000, hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=3, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False, dtype="float32",
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"tie_word_embeddings": True}, "qwen2": {}, "mistral": {"sliding_window": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "decoder_sparse_step": 1},
}
VARIANTS = {
    "full": (), "checkpointing": ("policy.gradient_checkpointing=true",),
    "adam8bit": ("policy.optimizer.name=adam8bit",),
    "lora": ("policy.lora.rank=16", "policy.lora.target_modules=[q_proj,v_proj]"),
}
LENGTH, ROWS = 128, 2  # of a sequence, and sequences of a micro-batch


def config_for(variant: str, world: int) -> Config:
    return load_config([
        "policy.model_path=somewhere", f"launch.num_learner_ranks={world}", "rollout.max_prompt_tokens=8",
        f"rollout.train.sampling.max_new_tokens={LENGTH - 8}", f"learner.max_tokens_per_device={LENGTH * ROWS}",
        "learner.logprob_chunk_tokens=128", *VARIANTS[variant],
    ])


def model_config(name: str) -> Any:
    return AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **MODELS[name], **changes})
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)  # float32 would be used where the file maps it
    model.save_pretrained(folder / name)
    return folder / name


def measured(folder: Path, names: list[str], variants: list[str], worlds: list[int], timeout_s: float) -> list[Any]:
    """What this script prints."""
    words = [",".join(map(str, some)) for some in (names, variants, worlds)]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",  # threads that read a model in a fork find torch's pool invalid at times
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, __file__, folder, *words], env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rows_of(world: int) -> list[Trajectory]:
    """Two full micro-batches for every rank."""
    rng, count = np.random.default_rng(0), LENGTH - 8
    return [
        Trajectory(
            group_id=group, index=index, prompt_ids=rng.integers(0, 6000, 8).astype(np.int32),
            token_ids=rng.integers(0, 6000, count).astype(np.int32), logprobs=np.full(count, -8.7, np.float32),
            mask=np.ones(count, bool), versions=np.zeros(count, np.int64), rewards=np.zeros(count, np.float32),
            turns=np.zeros(count, np.int64), reward=float(index), num_turns=1, scores={}, temperature=1.0,
            truncated=False,
        )
        for group in range(world) for index in range(2 * ROWS)
    ]


def resident(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def peak_of_step(model_dir: Path, variant: str, ranks: Ranks) -> int:
    """How far the resident size rises above what it was before the model, in a later step."""
    gc.collect()
    before = resident("RssAnon")
    config, world = config_for(variant, ranks.mesh.world), ranks.mesh.world
    job, lora = job_of(config, longest=LENGTH, on_gpu=False), config.policy.lora
    policy = load_policy(
        model_dir, ranks=ranks, gradient_checkpointing=config.policy.gradient_checkpointing,
        chunk_tokens=job.chunk_tokens,
        adapt=(lambda policy: add_adapter(policy, lora, seed=0)) if lora.rank is not None else None,
    )
    networks = Networks(policy, make_optimizer(policy, config.policy.optimizer))
    objective = Objective(AdvantageConfig(), LossConfig(), max_new_tokens=LENGTH, max_lag=9)
    trainer = Trainer(networks, Schedule("constant", 1e-6, 9), objective, TrainerSettings(job.tokens), ranks)
    rows = rows_of(world)
    mine, plan = [row for row in rows if row.group_id % world == ranks.dp_rank], plan_of(rows, world=world, version=0)
    trainer.train_batch(mine, plan)
    ranks.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
    plan = plan_of(rows, world=world, version=1)
    assert not trainer.train_batch(mine, plan).result.skipped
    return resident("VmHWM") - resident("RssFile") - resident("RssShmem") - before  # not the pages of libraries


def forked(model_dir: Path, variant: str, world: int) -> int:
    """The peak of rank 0 of so many processes, which have loaded and made nothing but what this one has."""
    receiver, sender = os.pipe()
    port, children = free_port(), []
    for rank in range(world):
        if not (child := os.fork()):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port)}  # fmt: skip
            try:
                found = peak_of_step(model_dir, variant, Ranks.start("cpu", timeout_s=100))
                os.write(sender, str(found).encode() if rank == 0 else b"")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * world
    return int(os.read(receiver, 100))


def main(folder: Path, names: list[str], variants: list[str], worlds: list[int]) -> None:
    torch.set_num_threads(1)  # no pool of threads, which a fork would lose
    peak_of_step(write_model("qwen2", folder, num_hidden_layers=1), "lora", Ranks())  # libraries and their memory
    for name in names:
        write_model(name, folder)
        for variant, world in product(variants, worlds):
            found = forked(folder / name, variant, world)
            print(json.dumps({"model": name, "variant": variant, "ranks": world, "bytes": found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(argument.split(",") for argument in sys.argv[2:4]), [*map(int, sys.argv[4].split(","))])
