"""Triton kernels of the output layer: logits are read once for their statistics and once for their gradient.

Plain tensor operations pass over the float32 logits of a chunk some ten times forward and eight times backward, which
takes longer than the matrix products. Without a GPU Triton's interpreter runs the kernels (`make kernels`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _NUM_WARPS = 4096, 8
_LOWEST = tl.constexpr(-3.0e38)  # an infinity here would make NaN of the first block's zeros


def measure(
    logits: Tensor, factors: Tensor, targets: Tensor, *, log_sums: Tensor, logprobs: Tensor, entropy: Tensor
) -> None:
    """Fill `log_sums`, `logprobs` and `entropy` of the rows of `logits * factors`; float32 [m], `logits` [m, V]."""
    num_rows, width = logits.shape
    _measure[(num_rows,)](
        logits,
        factors.contiguous(),
        targets.contiguous(),
        log_sums,
        logprobs,
        entropy,
        width,
        BLOCK=_block(width),
        num_warps=_NUM_WARPS,
    )


def pull_back(
    logits: Tensor,
    factors: Tensor,
    targets: Tensor,
    *,
    log_sums: Tensor,
    entropy: Tensor,
    to_logprobs: Tensor,
    to_entropy: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient in the logits, in `dtype`; in their place if that is theirs."""
    (num_rows, width), block = logits.shape, _block(logits.shape[1])
    down = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    _pull_back[(num_rows, triton.cdiv(width, block))](
        logits,
        factors.contiguous(),
        targets.contiguous(),
        log_sums,
        entropy,
        to_logprobs.contiguous(),  # the gradient of a sum is one number, expanded
        to_entropy.contiguous(),
        down,
        width,
        BLOCK=block,
        num_warps=_NUM_WARPS,
    )
    return down


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


@triton.jit
def _measure(logits, factors, targets, log_sums, logprobs, entropy, width, BLOCK: tl.constexpr):
    """Read one row: sums of powers and of powers times logits, relative to the highest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    own, factor = logits + row * width, tl.load(factors + row)
    highest = tl.load(own) * 0.0 + _LOWEST
    total = highest * 0.0
    moment = highest * 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(own + columns, mask=inside, other=float("-inf")) * factor
        higher = tl.maximum(highest, tl.max(z, 0))
        powers, fade = tl.exp(z - higher), tl.exp(highest - higher)
        below = tl.where(inside, z - higher, 0.0)
        moment = fade * (moment + (highest - higher) * total) + tl.sum(powers * below, 0)
        total = fade * total + tl.sum(powers, 0)
        highest = higher
    log_sum = highest + tl.log(total)
    chosen = tl.load(own + tl.load(targets + row)) * factor
    tl.store(log_sums + row, log_sum)
    tl.store(logprobs + row, chosen - log_sum)
    tl.store(entropy + row, tl.log(total) - moment / total)


@triton.jit
def _pull_back(
    logits, factors, targets, log_sums, entropy, to_logprobs, to_entropy, down, width, BLOCK: tl.constexpr
):
    """A block of a row: factor * (g (onehot - p) - e p (log p + H))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, factor = columns < width, tl.load(factors + row)
    log_p = tl.load(logits + row * width + columns, mask=inside, other=0.0) * factor - tl.load(log_sums + row)
    chosen, spread = tl.load(to_logprobs + row), tl.load(to_entropy + row)
    up = chosen + spread * (log_p + tl.load(entropy + row))
    hit = tl.where(columns == tl.load(targets + row), chosen, 0.0)
    found = (hit - up * tl.exp(log_p)) * factor
    tl.store(down + row * width + columns, found.to(down.dtype.element_ty), mask=inside)
