"""Inputs of the GPU benchmarks: real shapes with random weights, or small ones on the CPU in a dry run."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from learner.data.layout import PackedLayout, make_layout
from learner.model.policy import Policy

DRY_RUN = "STREAMRL_BENCH_DRY_RUN"
"""Set to a directory: every section with small shapes on the CPU, and files there in place of a GPU's shared memory."""
DRY = os.environ.get(DRY_RUN, "")
DEVICE = "cpu" if DRY else "cuda"
_REAL = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "tie_word_embeddings": True}
SHAPES: dict[str, Callable[..., Any]] = {
    "0.6b": partial(  # Qwen3-0.6B
        Qwen3Config, **_REAL, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128,
    ),
    "1.5b": partial(  # Qwen2.5-1.5B
        Qwen2Config, **_REAL, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "tiny": partial(
        Qwen3Config, vocab_size=512, max_position_embeddings=8192, tie_word_embeddings=True, hidden_size=64,
        intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    ),
}


def random_model(shape: str, **more: Any) -> Any:
    """Random weights in bfloat16, made on the device: seconds instead of minutes."""
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(SHAPES[shape](**more), dtype=torch.bfloat16)


def pinned(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] on the host, pinned where there is a GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not DRY)


def free_device_memory() -> None:
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


def large_folder() -> str | None:
    """Directory of documents, in memory as in a run."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def mixed_lengths(num_tokens: int, seed: int) -> list[int]:
    """Sequences of 1/32 to 1/4 of all, so that no two blocks have one shape."""
    generator, lengths = random.Random(seed), []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(left, generator.randint(max(2, num_tokens // 32), num_tokens // 4)))
    if len(lengths) > 1 and lengths[-1] < 2:
        lengths[-2] += lengths.pop()
    return lengths


@dataclass(frozen=True)
class Packed:
    """One packed row of random tokens, every token but the first of each sequence scored."""

    tokens: torch.Tensor
    positions: torch.Tensor
    packing: PackedLayout
    index: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> Packed:
        starts = [0, *accumulate(len(row) for row in rows)]
        index = torch.cat([torch.arange(len(row) - 1) + start for row, start in zip(rows, starts, strict=False)])
        packing = make_layout([len(row) for row in rows]).to(torch.device(DEVICE))
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        return cls(torch.cat(list(rows)).to(DEVICE), positions.to(DEVICE), packing, index.to(DEVICE))

    def score(self, policy: Policy) -> torch.Tensor:
        targets = self.tokens[self.index + 1]
        ones = torch.ones(len(self.index), device=self.tokens.device)
        return policy(self.tokens, self.positions, self.packing, self.index, targets, ones)[0]
