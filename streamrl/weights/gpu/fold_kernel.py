"""A Triton kernel for digests on a device: each word is read once. `make kernels` runs it in Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _NUM_WARPS = 4096, 8


def add(words: torch.Tensor, before: int, sums: torch.Tensor) -> None:
    """Add both sums of int32 words that `before` words precede to `sums`, int64 [2]."""
    with torch.cuda.device_of(words):
        _add[(triton.cdiv(words.numel(), _BLOCK),)](
            words,
            sums,
            words.numel(),
            before,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )


@triton.jit
def _add(words, sums, count, before, BLOCK: tl.constexpr):
    """The sums of a block; 64-bit numbers wrap, in any order of the blocks to the same."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(words + places, mask=places < count, other=0).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_add(sums, tl.sum(found, 0))
    tl.atomic_add(sums + 1, tl.sum(found * (places + before + 1), 0))
