"""Trained tokens per second where a prompt is packed once, and where it is packed for every answer.

The same policy, trajectories and gradients; forward and backward passes alternate between the arms in one process.
Tokens are those of the trajectories, prompts included, whether they were packed once or eight times. Prompts are new
tokens in each group, or begin alike as those with a system prompt do; then also with one answer each.

Run: python -m bench.shared_prompts [--quick]
"""

from __future__ import annotations

import argparse
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
from learner.data import shared_prompts
from learner.data.packing import MicroBatch, pack
from learner.data.trajectories import Trajectory
from learner.model.policy import Policy, load_policy

PROMPT, GROUP, LEAST, MOST = 320, 8, 8, 32
NUM_ALIKE = 256
"""Leading tokens of a prompt that all prompts have, where they begin alike."""
GOAL = {"id": "issue 11, 1", "op": ">=", "value": 2.5}
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
         "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip
ARMS = {"alone": (False, False), "groups": (True, False), "prompts": (True, True)}
"""Whether the answers of a group share their prompt, and groups what their prompts begin with."""
CASES = {"new": (GROUP, 0), "alike": (GROUP, NUM_ALIKE), "alike_single": (1, NUM_ALIKE)}
"""Answers to a prompt, and leading tokens that all prompts have."""


def trajectories(
    num_prompts: int, seed: int, *, size: int, num_alike: int, prompt_tokens: int = PROMPT,
    answer_tokens: tuple[int, int] = (LEAST, MOST),
) -> list[Trajectory]:
    """Groups of one turn; each answer has from the least to the most tokens."""
    rng, made = np.random.default_rng(seed), []
    opening = rng.integers(0, SIZES["vocab_size"], num_alike, dtype=np.int32)
    for group in range(num_prompts):
        own = rng.integers(0, SIZES["vocab_size"], prompt_tokens - num_alike, dtype=np.int32)
        prompt = np.concatenate([opening, own])
        for index in range(size):
            length = int(rng.integers(answer_tokens[0], answer_tokens[1] + 1))
            rewards = np.zeros(length, dtype=np.float32)
            made.append(Trajectory(
                group_id=group, index=index, prompt_ids=prompt,
                token_ids=rng.integers(0, SIZES["vocab_size"], length, dtype=np.int32),
                logprobs=np.full(length, -8.0, dtype=np.float32), mask=np.ones(length, dtype=bool),
                versions=np.zeros(length, dtype=np.int64), rewards=rewards, turns=np.zeros(length, dtype=np.int64),
                reward=0.0, num_turns=1, scores={}, temperature=1.0, truncated=False,
            ))
    return made


def packed(rows: list[Trajectory], arm: str, max_tokens: int = 4096) -> list[MicroBatch]:
    """The micro-batches of an arm."""
    share, stems = ARMS[arm]
    least = shared_prompts.LEAST_STEM_TOKENS
    shared_prompts.LEAST_STEM_TOKENS = least if stems else 1 << 30
    try:
        return pack(rows, max_tokens, share=share)
    finally:
        shared_prompts.LEAST_STEM_TOKENS = least


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
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(arguments.seed)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, max_position_embeddings=1024)).save_pretrained(folder)
        policy = load_policy(Path(folder))
    lines = [line for case in CASES for line in compared(policy, case, arguments)]
    return exit_status(lines, check=arguments.check)


def compared(policy: Policy, case: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for the speed, and one for each arm that the last is compared with."""
    size, num_alike = CASES[case]
    repeats, num_groups = (2, 1 + bool(num_alike)) if arguments.quick else (arguments.repeats, 3)
    rows = trajectories(num_groups * GROUP // size, arguments.seed, size=size, num_alike=num_alike)
    arms = {arm: packed(rows, arm) for arm in ARMS if num_alike or arm != "prompts"}
    num_tokens = sum(row.num_tokens for row in rows)
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    norms: dict[str, float] = {}
    for turn in range(repeats + 1):
        for arm, batches in arms.items():
            taken, norms[arm] = seconds(policy, batches)
            if turn:  # the first warms up
                rates[arm].append(num_tokens / taken)
    assert max(norms.values()) / min(norms.values()) - 1.0 < 1e-4, norms
    params: dict[str, Any] = {
        **SIZES, "prompt_tokens": PROMPT, "alike_tokens": num_alike, "answers": size, "answer_tokens": [LEAST, MOST],
        "groups": num_groups * GROUP // size, "clock": "CPU time of the process, one thread, alternating", "warm_up": 1,
        "packed_tokens": {arm: sum(batch.num_tokens for batch in batches) for arm, batches in arms.items()},
        "tokens_per_s": rates,
    }
    best, *others = reversed(arms)
    name = "learner.shared_prompts" if case == "new" else f"learner.shared_prompts.{case}"
    return [record(
        f"{name}.tokens_per_s", statistics.median(rates[best]), "tokens/s", "higher", rates[best], params,
        seed=arguments.seed,
    )] + [record(
        f"{name}.speedup" if case == "new" else f"{name}.speedup_over_{other}", statistics.median(ratios), "x",
        "higher", ratios, params, goal=GOAL if case == "new" else None, seed=arguments.seed,
    ) for other in others for ratios in [[x / y for x, y in zip(rates[best], rates[other], strict=True)]]]


if __name__ == "__main__":
    sys.exit(main())
