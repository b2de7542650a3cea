"""The kernels of attention on a GPU, against sdpa in the same type."""

import pytest

from tests.gpu.device import finish, needs_gpu, start

pytestmark = [*needs_gpu, pytest.mark.timeout(300)]

COMPARE = """
import sys

import torch

from learner.model.attention.kernels import choose_attention, difference_from_sdpa, why_not

device, kind = torch.device("cuda", 0), sys.argv[1]
reason = why_not(kind, device=device, dtype=torch.bfloat16)
if "not installed" in reason:
    print("skip", reason)
else:
    assert not reason, reason
    print(difference_from_sdpa(kind, device=device, dtype=torch.bfloat16))
    assert choose_attention("auto", device=device, dtype=torch.bfloat16) in ("varlen", "sdpa")
"""
POLICY = """
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.data.packing import pack
from learner.data.trajectories import Trajectory
from learner.ranks.mesh import Ranks
from learner.model.policy import load_policy

folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)
torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
)).save_pretrained(folder)
prompt = rng.integers(0, 4096, 200, dtype=np.int32)
prompts = prompt, np.concatenate([prompt[:120], rng.integers(0, 4096, 50, dtype=np.int32)])
rows = [Trajectory(
    group_id=i % 2, index=i // 2, prompt_ids=prompts[i % 2], token_ids=rng.integers(0, 4096, n, dtype=np.int32),
    logprobs=np.full(n, -8.0, np.float32), mask=np.ones(n, bool), versions=np.zeros(n, np.int64),
    rewards=np.zeros(n, np.float32), turns=np.zeros(n, np.int64), reward=0.0, num_turns=1, scores={}, temperature=1.0,
    truncated=False,
) for i, n in enumerate((9, 40, 33, 17))]
ranks = Ranks.start("cuda", sharded=True)
found = {}
for kind, share, backend in (
    ("sdpa", False, None), ("sdpa", True, None), ("varlen", True, None), ("flex_attention", True, None),
    ("varlen", True, "inductor"),
):
    policy = load_policy(folder, dtype=torch.bfloat16, ranks=ranks, attention=kind, share_prompts=True,
                         compile_with=backend)
    (micro,) = [one.to(ranks.device) for one in pack(rows, 4096, share=share)]
    scored, _ = policy(
        micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
    )
    scored.sum().backward()
    norm = sum(float(p.grad.full_tensor().double().square().sum()) for p in policy.parameters()) ** 0.5
    found[kind, share, backend] = micro.padded(scored.detach()), norm
ranks.close()
base, norm = found["sdpa", False, None]
for name, (other, other_norm) in found.items():
    print(name, float((base - other).abs().max()), other_norm / norm)
    assert float((base - other).abs().max()) < 0.2 and abs(other_norm / norm - 1) < 0.05, name
"""


@pytest.mark.parametrize("kind", ["varlen", "flex_attention", "flash_attention_2", "flash_attention_3"])
def test_a_kernel_agrees_with_sdpa_in_half_precision(kind):
    if (said := finish(start(COMPARE, kind))).startswith("skip"):
        pytest.skip(said)


def test_a_policy_gives_the_same_with_every_kernel_shared_prompts_and_compiled_layers():
    finish(start(POLICY), timeout_s=280.0)
