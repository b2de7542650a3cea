"""Lag: how many optimizer steps lie between the weights that sampled a token and the step that trains on it.

Version n is the number of optimizer steps done; a batch whose update produces n + 1 trains at version n, and a token of
version v has lag `n - v`. Unit: optimizer steps. B in the formulas of capacity is groups per optimizer step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_alike, check_tokens, require
from streamrl.algorithms.types import LagForecast, LagSummary

__all__ = [
    "accepted_after_restart", "admissible", "capacity", "default_max_lag", "forecast_lag", "group_spread", "lag_keep",
    "lag_summary", "lag_weights", "split_by_lag", "token_lags",
]


def capacity(
    *, version: int, eta: int, batch_size: int, accepted: int, running: int, max_concurrent: int | None = None
) -> int:
    """How many more groups may be leased now: `(eta + version + 1) B - accepted - running`, at least 0.

    Args:
        version: the version *installed on the asking actor*, not the learner's. With the learner's version a late
            install breaks the bound `eta + ceil(W / B)`.
        eta: allowed lag in optimizer steps; 0 is synchronous.
        batch_size: B, groups per optimizer step.
        accepted, running: groups ever accepted (trained ones too) and leases outstanding. A group that is filtered,
            rejected, cancelled or failed leaves the count at once; left inside it leaks capacity until dispatch stops.
        max_concurrent: further limit on outstanding leases.
    """
    require(batch_size >= 1, f"batch_size={batch_size} must be at least 1")
    require(eta >= 0 and version >= 0, f"eta={eta} and version={version} must not be negative")
    require(accepted >= 0 and running >= 0, f"accepted={accepted} and running={running} must not be negative")
    free = (eta + version + 1) * batch_size - accepted - running
    if max_concurrent is not None:
        free = min(free, max_concurrent - running)
    return max(0, free)


def accepted_after_restart(version: int, batch_size: int, num_restored: int = 0) -> int:
    """The `accepted` count after a restart at `version`: `version * B` plus restored, unconsumed groups.

    Counting from 0 would admit a burst of `version * B` groups.
    """
    require(
        version >= 0 and num_restored >= 0, f"version={version} and num_restored={num_restored} must not be negative"
    )
    require(batch_size >= 1, f"batch_size={batch_size} must be at least 1")
    return version * batch_size + num_restored


def default_max_lag(eta: int, window: int, batch_size: int) -> int:
    """`eta + ceil(window / B)`: the lag that admission can reach, so that the check at the batch cut never fires."""
    require(eta >= 0 and window >= 0, f"eta={eta} and window={window} must not be negative")
    require(batch_size >= 1, f"batch_size={batch_size} must be at least 1")
    return eta + math.ceil(window / batch_size)


@torch.no_grad()
def token_lags(versions: Tensor, version: int, mask: Tensor) -> Tensor:
    """`version - versions` per action token, 0 elsewhere; int64 [B, T]. A negative lag is a fault: a future version."""
    check_tokens(mask, versions=versions)
    lags = version - versions.long()
    return torch.where(mask, lags, torch.zeros_like(lags))


@torch.no_grad()
def lag_summary(versions: Tensor, version: int, mask: Tensor) -> LagSummary:
    """Head, tail, span and mean lag of each row over its action tokens; see `LagSummary`."""
    lags = token_lags(versions, version, mask)
    occupied = mask.any(1)
    if not mask.shape[1]:
        return LagSummary(head=lags.sum(1), tail=lags.sum(1), span=lags.sum(1), mean=lags.sum(1).float())
    extreme = torch.iinfo(torch.int64).max
    zero = torch.zeros_like(lags[:, 0])
    head = torch.where(occupied, torch.where(mask, lags, -extreme).amax(1), zero)
    tail = torch.where(occupied, torch.where(mask, lags, extreme).amin(1), zero)
    mean = lags.sum(1).float() / mask.sum(1).clamp(min=1).float()
    return LagSummary(head=head, tail=tail, span=head - tail, mean=mean)


@torch.no_grad()
def admissible(summary: LagSummary, *, max_lag: int) -> Tensor:
    """Rows that may enter a batch: head lag <= max_lag and no token from the future; bool [B].

    The hard check. Call it when the batch is cut, because queued trajectories age.
    """
    require(max_lag >= 0, f"max_lag={max_lag} must not be negative")
    return (summary.head <= max_lag) & (summary.tail >= 0)


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


@torch.no_grad()
def group_spread(head_lags: Tensor, group_ids: Tensor) -> Tensor:
    """Largest minus smallest head lag of each row's group; int64 [B]."""
    check_alike(head_lags=head_lags, group_ids=group_ids)
    unique, index = group_ids.unique(return_inverse=True)
    lags = head_lags.long()
    start = lags.new_zeros(unique.numel())
    highest = start.scatter_reduce(0, index, lags, "amax", include_self=False)
    lowest = start.scatter_reduce(0, index, lags, "amin", include_self=False)
    return (highest - lowest)[index]


def forecast_lag(
    *,
    groups_per_s: float,
    batch_size: int,
    num_in_flight: float,
    num_queued: float,
    mean_tokens: float,
    mean_square_tokens: float,
    s_per_token: float,
) -> LagForecast:
    """Expected lag by Little's law, in optimizer steps: what to expect of a layout before it runs.

    Args:
        groups_per_s: throughput X; the learner makes X / B steps a second.
        num_in_flight, num_queued: groups being generated, groups waiting.
        mean_tokens, mean_square_tokens: E[L], E[L^2] of response lengths; heavy tails raise the token lag.
        s_per_token: seconds to generate one token.
    Returns:
        head `(in_flight + queued) / B`; token_mean `(in_flight / 2 + queued) / B`;
        token_weighted `(X / B) (s_per_token E[L^2] / (2 E[L]) + queued / X)`.
    """
    require(groups_per_s > 0, f"groups_per_s={groups_per_s} must be positive")
    require(batch_size >= 1, f"batch_size={batch_size} must be at least 1")
    require(mean_tokens > 0, f"mean_tokens={mean_tokens} must be positive")
    flight_s = s_per_token * mean_square_tokens / (2.0 * mean_tokens)
    return LagForecast(
        head=(num_in_flight + num_queued) / batch_size,
        token_mean=(num_in_flight / 2.0 + num_queued) / batch_size,
        token_weighted=groups_per_s / batch_size * (flight_s + num_queued / groups_per_s),
    )
