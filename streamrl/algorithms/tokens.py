"""Per-token numbers from per-row ones, and backward recursions over action tokens.

Recursions step over gaps and padding: a masked position has increment 0 and decay 1, so the accumulator passes through
it unchanged; "next" always means the next action token of the row. The scan is one loop over T on [B] vectors, a single
fused multiply-add a step; on an accelerator every step is a kernel launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_rows, check_tokens, clamped_difference, discounts, float_dtype, only, read
from streamrl.algorithms.types import Moments

__all__ = [
    "broadcast_rows", "moments", "place_terminal", "reward_to_go", "whiten",
]


@torch.no_grad()
def place_terminal(scores: Tensor, mask: Tensor) -> Tensor:
    """`scores` [B] on each row's last action token, 0 elsewhere; [B, T], detached."""
    check_rows(mask, scores=scores)
    return only(last_action(mask), scores.to(float_dtype(scores))[:, None].expand(mask.shape))


@torch.no_grad()
def broadcast_rows(per_row: Tensor, mask: Tensor) -> Tensor:
    """`per_row` [B] on every action token of its row, 0 elsewhere; [B, T], detached."""
    check_rows(mask, per_row=per_row)
    return only(mask, per_row.to(float_dtype(per_row))[:, None].expand(mask.shape))


@torch.no_grad()
def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float | Tensor = 1.0) -> Tensor:
    """`G_t = r_t + gamma_t G_{t+1}` over action tokens, across gaps; [B, T], detached.

    Observation tokens neither reset nor discount the sum, so early turns learn from the final reward.
    `gamma` is a float or [B, T] (per-turn discounting).
    """
    (rewards,) = read(mask, rewards=rewards)
    decays = discounts(gamma, mask, rewards.dtype)
    if not isinstance(gamma, Tensor) and gamma == 1.0:
        return only(mask, rewards.flip(1).cumsum(1).flip(1))
    return only(mask, suffix_scan(rewards, decays, rewards.new_zeros(rewards.shape[0])))


@torch.no_grad()
def moments(values: Tensor, mask: Tensor) -> Moments:
    """Count, sum and sum of squares of `values` over action tokens, in float64; add over ranks before use."""
    check_tokens(mask, values=values)
    wide = only(mask, values.double())
    return Moments(count=mask.sum().double(), total=wide.sum(), total_squares=wide.square().sum())


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, *, moments: Moments | None = None, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / (std + eps)` over the batch's action tokens, unbiased std; [B, T], detached.

    Pass the `moments` of the whole optimizer batch when `values` is only a part of it. One token or a constant gives 0.
    """
    check_tokens(mask, values=values)
    given = moments if moments is not None else _moments(values, mask)
    count, total, squares = (
        torch.as_tensor(number, dtype=torch.float64, device=values.device)
        for number in (given.count, given.total, given.total_squares)
    )
    mean = total / count.clamp(min=1.0)
    variance = (squares - total * mean).clamp(min=0.0) / (count - 1.0).clamp(min=1.0)
    white = (only(mask, values.double()) - mean) / (variance.sqrt() + eps)
    return only(mask, white.to(float_dtype(values)))


_moments = moments  # `whiten` has an argument of that name


def recursion_inputs(
    mask: Tensor, bootstrap_values: Tensor, gamma: float | Tensor, **tensors: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The [B, T] tensors with 0 at masked positions, bootstrap values [B] and discounts [B, T], of one dtype."""
    check_tokens(mask, **tensors)
    check_rows(mask, bootstrap_values=bootstrap_values)
    dtype = float_dtype(bootstrap_values, *tensors.values())
    clean = [only(mask, tensor.to(dtype)) for tensor in tensors.values()]
    return clean, bootstrap_values.to(dtype), discounts(gamma, mask, dtype)


def off_policy_inputs(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, mask: Tensor, bootstrap_values: Tensor, gamma: float | Tensor,
    **tensors: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Clamped log-ratios [B, T], then what `recursion_inputs` returns."""
    (behavior, policy, *clean), last, gammas = recursion_inputs(
        mask, bootstrap_values, gamma, behavior_logprobs=behavior_logprobs, policy_logprobs=policy_logprobs, **tensors
    )
    return clamped_difference(behavior, policy), clean, last, gammas


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
