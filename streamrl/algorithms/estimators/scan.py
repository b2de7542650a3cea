"""Backward recursions over action tokens that step over gaps and padding.

A masked position has increment 0 and decay 1, so the accumulator passes through it unchanged; "next" always means the
next action token of the row. The scan is one loop over T on [B] vectors, a single fused multiply-add a step; on an
accelerator every step is a kernel launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_rows, check_tokens, discounts, float_dtype, only


def recursion_inputs(
    mask: Tensor, bootstrap_values: Tensor, gamma: float | Tensor, **tensors: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The [B, T] tensors with 0 at masked positions, bootstrap values [B] and discounts [B, T], of one dtype."""
    check_tokens(mask, **tensors)
    check_rows(mask, bootstrap_values=bootstrap_values)
    dtype = float_dtype(bootstrap_values, *tensors.values())
    clean = [only(mask, tensor.to(dtype)) for tensor in tensors.values()]
    return clean, bootstrap_values.to(dtype), discounts(gamma, mask, dtype)


def suffix_scan(increments: Tensor, decays: Tensor, last: Tensor) -> Tensor:
    """`x_t = increments_t + decays_t x_{t+1}` with `x_{T+1} = last`; [B, T], [B, T], [B] -> [B, T]."""
    # Time-major and contiguous, so that each step reads one run of memory.
    steps = zip(increments.t().contiguous().unbind(0), decays.t().contiguous().unbind(0), strict=True)
    carried, outputs = last, []
    for increment, decay in reversed(list(steps)):
        carried = torch.addcmul(increment, decay, carried)
        outputs.append(carried)
    if not outputs:
        return increments.clone()
    return torch.stack(outputs[::-1], dim=1)


def next_action(values: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """Return `values` at the row's next action token for each position, or `last` [B] if there is none; [B, T]."""
    width = mask.shape[1]
    positions = torch.arange(width, device=mask.device).expand_as(mask)
    nearest = torch.where(mask, positions, width).flip(1)
    nearest = nearest.cummin(dim=1).values.flip(1) if width else nearest
    following = torch.cat([nearest[:, 1:], torch.full_like(nearest[:, :1], width)], dim=1)
    return torch.cat([values, last[:, None]], dim=1).gather(1, following)


def last_action(mask: Tensor) -> Tensor:
    """Bool [B, T], True on the last action token of each row."""
    remaining = mask.flip(1).cumsum(1).flip(1)
    return mask & (remaining == 1)
