"""What sharing prompts saves: trained tokens per second of groups, a prompt packed once or packed for every answer.

The same policy, trajectories and gradients; forward and backward passes alternate between the two in one process.
Tokens are those of the trajectories, prompts included, whether they were packed once or eight times.

Run: python -m bench.shared_prompts [--quick]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.record import exit_status, record, shared_arguments
from learner.data.packing import MicroBatch, pack
from learner.data.trajectories import Trajectory
from learner.model.policy import Policy, load_policy

PROMPT, GROUP, LEAST, MOST = 320, 8, 8, 32
GOAL = {"id": "issue 11, 1", "op": ">=", "value": 2.5}
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
         "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip


def trajectories(num_groups: int, seed: int) -> list[Trajectory]:
    """Groups of one turn; each answer has from LEAST to MOST tokens."""
    rng, made = np.random.default_rng(seed), []
    for group in range(num_groups):
        prompt = rng.integers(0, SIZES["vocab_size"], PROMPT, dtype=np.int32)
        for index in range(GROUP):
            length = int(rng.integers(LEAST, MOST + 1))
            rewards = np.zeros(length, dtype=np.float32)
            made.append(Trajectory(
                group_id=group, index=index, prompt_ids=prompt,
                token_ids=rng.integers(0, SIZES["vocab_size"], length, dtype=np.int32),
                logprobs=np.full(length, -8.0, dtype=np.float32), mask=np.ones(length, dtype=bool),
                versions=np.zeros(length, dtype=np.int64), rewards=rewards, turns=np.zeros(length, dtype=np.int64),
                reward=0.0, num_turns=1, scores={}, temperature=1.0, truncated=False,
            ))
    return made


def seconds(policy: Policy, batches: list[MicroBatch]) -> tuple[float, float]:
    """(CPU seconds of forward and backward passes, their gradient's norm)."""
    policy.zero_grad()
    began = time.process_time()
    for batch in batches:
        logprobs, _ = policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures
        )
        logprobs.sum().backward()
    taken = time.process_time() - began
    return taken, sum(float(p.grad.double().square().sum()) for p in policy.parameters()) ** 0.5


def main() -> int:
    arguments = shared_arguments(__doc__ or "").parse_args()
    repeats, num_groups = (2, 1) if arguments.quick else (arguments.repeats, 3)
    torch.set_num_threads(1)
    rows = trajectories(num_groups, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(arguments.seed)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, max_position_embeddings=1024)).save_pretrained(folder)
        policy = load_policy(Path(folder))
    packed = {shared: pack(rows, 4096, share=shared) for shared in (False, True)}
    num_tokens = sum(row.num_tokens for row in rows)
    rates: dict[bool, list[float]] = {False: [], True: []}
    norms: dict[bool, float] = {}
    for turn in range(repeats + 1):
        for shared, batches in packed.items():
            taken, norms[shared] = seconds(policy, batches)
            if turn:  # the first warms up
                rates[shared].append(num_tokens / taken)
    assert abs(norms[True] / norms[False] - 1.0) < 1e-4, norms
    plain, fast = (statistics.median(rates[shared]) for shared in (False, True))
    params: dict[str, Any] = {
        **SIZES, "prompt_tokens": PROMPT, "answers": GROUP, "answer_tokens": [LEAST, MOST], "groups": num_groups,
        "packed_tokens": {str(shared): sum(b.num_tokens for b in packed[shared]) for shared in packed},
        "clock": "CPU time of the process, one thread, alternating", "warm_up": 1,
    }
    baseline = {"name": "every answer with a prompt of its own", "value": plain, "unit": "tokens/s", "source":
                "this bench", "version": "1", "measured_here": True}  # fmt: skip
    lines = [record(
        "learner.shared_prompts.tokens_per_s", fast, "tokens/s", "higher", rates[True], params, baseline,
        seed=arguments.seed,
    ), record(
        "learner.shared_prompts.speedup", fast / plain, "x", "higher",
        [x / y for x, y in zip(rates[True], rates[False], strict=True)], params, goal=GOAL, seed=arguments.seed,
    )]
    return exit_status(lines, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
