"""Token log-probs from logits, and per-token numbers from per-row ones."""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_rows, check_tokens, discounts, float_dtype, only, read
from streamrl.algorithms.estimators.scan import last_action, suffix_scan
from streamrl.algorithms.types import Moments

__all__ = ["broadcast_rows", "moments", "place_terminal", "reward_to_go", "whiten"]



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
