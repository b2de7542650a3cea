"""Lag: optimizer steps between the weights that sampled a token and the step that trains on it.

Version n is the number of optimizer steps done; a batch whose update produces n + 1 trains at version n, and a token of
version v has lag `n - v`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_alike, check_tokens, require
from streamrl.algorithms.types import LagSummary

__all__ = ["lag_keep", "lag_summary", "lag_weights", "split_by_lag", "token_lags"]


@torch.no_grad()
def token_lags(versions: Tensor, version: int, mask: Tensor) -> Tensor:
    """`version - versions` per action token, 0 elsewhere; int64 [B, T]. A negative lag is a fault: a future version."""
    check_tokens(mask, versions=versions)
    lags = version - versions.long()
    return torch.where(mask, lags, torch.zeros_like(lags))


@torch.no_grad()
def lag_summary(versions: Tensor, version: int, mask: Tensor) -> LagSummary:
    """Lag of each row's oldest and newest action token; see `LagSummary`."""
    lags = token_lags(versions, version, mask)
    if not mask.shape[1]:
        return LagSummary(head=lags.sum(1), tail=lags.sum(1))
    extreme, occupied = torch.iinfo(torch.int64).max, mask.any(1)
    head = torch.where(mask, lags, -extreme).amax(1)
    tail = torch.where(mask, lags, extreme).amin(1)
    return LagSummary(head=torch.where(occupied, head, 0), tail=torch.where(occupied, tail, 0))


@torch.no_grad()
def lag_keep(lags: Tensor, mask: Tensor, *, max_lag: int | Tensor) -> Tensor:
    """Action tokens with `0 <= lag <= max_lag`; bool [B, T]. Masks the too-old prefix instead of dropping the row.

    `max_lag` may be int64 [B, 1]: a bound for each trajectory.
    """
    require(bool(torch.as_tensor(max_lag >= 0).all()), f"max_lag={max_lag} must not be negative")
    check_tokens(mask, lags=lags)
    return mask & (lags >= 0) & (lags <= max_lag)


@torch.no_grad()
def lag_weights(lags: Tensor, mask: Tensor, *, max_lag: int, decay: float) -> Tensor:
    """`decay ** (lag - max_lag)` on tokens older than max_lag, 1 on the others; float32 [B, T], 0 off the mask.

    Multiplies token losses whose denominator stays: old tokens count less, the others no more than before.
    """
    require(max_lag >= 0, f"max_lag={max_lag} must not be negative")
    require(0.0 <= decay <= 1.0, f"decay={decay} must lie in [0, 1]")
    check_tokens(mask, lags=lags)
    beyond = torch.where(mask, lags - max_lag, torch.zeros_like(lags)).clamp(min=0)
    return torch.pow(torch.tensor(decay, device=lags.device), beyond) * mask


def split_by_lag(group_ids: Tensor, head_lags: Tensor, *, budget: int) -> Tensor:
    """New group numbers in which no group spreads over more than `budget` optimizer steps of head lag; int64 [B].

    A group is cut into runs of neighboring lags, youngest first, each as long as the budget allows; groups within it
    stay whole. Rows of a sub-group are compared with each other only, because policies that far apart have no common
    mean.
    """
    require(budget >= 0, f"budget={budget} must not be negative")
    check_alike(group_ids=group_ids, head_lags=head_lags)
    order = sorted(range(len(group_ids)), key=lambda i: (int(group_ids[i]), int(head_lags[i])))
    result = torch.zeros_like(group_ids, dtype=torch.int64)
    number, first = -1, (None, 0)
    for i in order:
        group, lag = int(group_ids[i]), int(head_lags[i])
        if group != first[0] or lag - first[1] > budget:
            number, first = number + 1, (group, lag)
        result[i] = number
    return result
