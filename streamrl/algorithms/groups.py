"""Advantages and baselines of trajectories that answer the same prompt.

Scores are total rewards, one per row [B]; rows of equal `group_ids` [B] belong together, in any order. Everything here
is detached and per row; `broadcast_rows` puts it on the tokens. Standard deviations are unbiased. A group of one row
uses the statistics of its pool (leave-one-out: all other rows of it): the rows of equal `pool_ids` [B], by default the
whole batch. A single row in its pool has advantage 0.
Sums are taken relative to the group's smallest score, in float64: equal scores give exactly 0, whatever their value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_alike, float_dtype, only, read, require
from streamrl.algorithms.tokens import reward_to_go, whiten
from streamrl.algorithms.types import Moments

__all__ = [
    "gdpo_advantages", "group_advantages", "group_mean", "grpo_advantages", "leave_one_out", "opob",
    "optimal_advantages", "reinforce_pp_advantages", "score_square_norms",
]


@dataclass(frozen=True, eq=False, slots=True)
class _Grouping:
    """Rows sorted into groups; sums and minima are per row, over its group."""

    index: Tensor  # int64 [B], dense group number
    count: Tensor  # float64 [B], size of the row's group
    num_groups: int

    def sum(self, values: Tensor) -> Tensor:
        totals = values.new_zeros(self.num_groups).index_add_(0, self.index, values)
        return totals[self.index]

    def minimum(self, values: Tensor) -> Tensor:
        lowest = values.new_full((self.num_groups,), torch.inf)
        return lowest.scatter_reduce_(0, self.index, values, "amin")[self.index]


def _grouping(group_ids: Tensor) -> _Grouping:
    unique, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    return _Grouping(index=index, count=sizes.double()[index], num_groups=unique.numel())


def _centered_in(scores: Tensor, groups: _Grouping) -> tuple[Tensor, Tensor]:
    """`score - mean` and the unbiased std of each row's group, float64 [B]."""
    above = scores - groups.minimum(scores)
    centered = above - groups.sum(above) / groups.count
    variance = groups.sum(centered.square()) / (groups.count - 1.0).clamp(min=1.0)
    return centered, variance.sqrt()


def center_by_group(
    scores: Tensor,
    group_ids: Tensor,
    pool_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`score - mean`, std, and the number of rows they come from; the pool's for groups of one. float64 [B]."""
    check_alike(scores=scores, group_ids=group_ids)
    wide, groups = scores.double(), _grouping(group_ids)
    if not scores.numel():
        return wide, wide, wide
    own, own_std = _centered_in(wide, groups)
    pools = _grouping(torch.zeros_like(group_ids) if pool_ids is None else pool_ids)
    pool, pool_std = _centered_in(wide, pools)
    alone = groups.count == 1
    count = torch.where(alone, pools.count, groups.count)
    return torch.where(alone, pool, own), torch.where(alone, pool_std, own_std), count


@torch.no_grad()
def group_mean(scores: Tensor, group_ids: Tensor, pool_ids: Tensor | None = None) -> Tensor:
    """Mean score of each row's group, [B]; its pool's mean for a group of one."""
    centered, _, _ = center_by_group(scores, group_ids, pool_ids)
    return (scores.double() - centered).to(float_dtype(scores))


@torch.no_grad()
def leave_one_out(
    scores: Tensor,
    group_ids: Tensor,
    pool_ids: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    min_ess: float = 2.0,
) -> Tensor:
    """Mean score of the *other* rows of the group, [B]; of the other rows of its pool for a group of one.

    With `weights` [B] (sequence ratios, truncated and detached) it is their weighted mean `sum w_j R_j / sum w_j` over
    j != i, which estimates the current policy's value from stale siblings with a bias of O(1/ESS). Where the others'
    count `(sum w)^2 / sum w^2` is below `min_ess`, the plain mean is used. Row i never enters its own baseline.
    """
    centered, _, count = center_by_group(scores, group_ids, pool_ids)
    wide = scores.double()
    others = centered * count / (count - 1.0).clamp(min=1.0)  # score - mean of the others
    plain = torch.where(count > 1, wide - others, wide)
    if weights is None:
        return plain.to(float_dtype(scores))
    check_alike(scores=scores, weights=weights)
    weighted, ess_count = _weighted_others(wide, weights.double(), _grouping(group_ids), leave_out=True)
    trusted = (ess_count >= min_ess) & (ess_count > 0)
    return torch.where(trusted, weighted, plain).to(float_dtype(scores))


def _weighted_others(scores: Tensor, weights: Tensor, groups: _Grouping, *, leave_out: bool) -> tuple[Tensor, Tensor]:
    """Weighted mean of the group and its ESS count (0 without any weight), [B]; without row i if `leave_out`."""
    if not scores.numel():
        return scores, scores
    own = weights if leave_out else torch.zeros_like(weights)
    lowest = groups.minimum(scores)
    mass = groups.sum(weights) - own
    squares = groups.sum(weights.square()) - own.square()
    weighted = groups.sum(weights * (scores - lowest)) - own * (scores - lowest)
    # What rounding leaves of the subtraction is not a weight.
    present = (mass > 1e-12 * groups.sum(weights)) & (squares > 0)
    mean = lowest + weighted / torch.where(present, mass, 1.0)
    return mean, only(present, mass.square() / torch.where(present, squares, 1.0))


@torch.no_grad()
def opob(
    scores: Tensor,
    group_ids: Tensor,
    weights: Tensor,
    square_norms: Tensor,
    *,
    leave_one_out: bool = True,
) -> Tensor:
    """Off-policy optimal baseline `sum w^2 g R / sum w^2 g` of the group, [B]: it minimizes the gradient's variance.

    `weights` [B] are sequence ratios, `square_norms` [B] the squared norms g of each trajectory's score gradient
    (`score_square_norms` is a cheap stand-in). Including row i biases the gradient a little, hence `leave_one_out`.
    Without any mass the plain mean of the same rows is used. Source: VCPO, arXiv:2602.17616.
    """
    check_alike(scores=scores, group_ids=group_ids, weights=weights, square_norms=square_norms)
    wide, groups = scores.double(), _grouping(group_ids)
    mass = weights.double().square() * square_norms.double()
    best, count = _weighted_others(wide, mass, groups, leave_out=leave_one_out)
    plain = _leave_one_out(scores, group_ids) if leave_one_out else group_mean(scores, group_ids)
    usable = (count > 0) & (groups.count > 1)
    return torch.where(usable, best, plain.double()).to(float_dtype(scores))


_leave_one_out = leave_one_out  # `opob` has a flag of that name


@torch.no_grad()
def score_square_norms(token_probs: Tensor, prob_square_sums: Tensor, mask: Tensor) -> Tensor:
    """`sum_t (1 - 2 p_t + sum_v p_{t,v}^2)`, [B]: squared norm of the gradient of the log-prob in the logits.

    `token_probs` [B, T] is the probability of the sampled token, `prob_square_sums` [B, T] sums squares over the
    vocabulary.
    """
    probs, squares = read(mask, token_probs=token_probs, prob_square_sums=prob_square_sums)
    return only(mask, 1.0 - 2.0 * probs + squares).sum(1)


@torch.no_grad()
def grpo_advantages(scores: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """`(R - mean) / (std + eps)`, [B]. One std over a group of mixed lags or temperatures misleads.

    Source: GRPO, arXiv:2402.03300.
    """
    centered, std, _ = center_by_group(scores, group_ids)
    return (centered / (std + eps)).to(float_dtype(scores))


@torch.no_grad()
def gdpo_advantages(components: Tensor, group_ids: Tensor, weights: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Each reward component normalized in its group as in GRPO, summed with `weights`, whitened over the batch; [B].

    `components` [B, K], `weights` [K]. Normalized before the sum, a component with a small range still counts.
    Source: GDPO, arXiv:2601.05242.
    """
    require(
        components.dim() == 2 and weights.shape == components.shape[1:],
        f"components has shape {list(components.shape)} but weights has shape {list(weights.shape)}: "
        "expected [B, K] and [K]",
    )
    total = torch.zeros(components.shape[0], dtype=torch.float64, device=components.device)
    for column, weight in zip(components.double().unbind(1), weights.double(), strict=True):
        total = total + weight * grpo_advantages(column, group_ids, eps=eps)
    everywhere = torch.ones_like(total, dtype=torch.bool)[:, None]
    return whiten(total[:, None], everywhere).squeeze(1).to(float_dtype(components))


@torch.no_grad()
def reinforce_pp_advantages(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    moments: Moments | None = None,
) -> Tensor:
    """Return-to-go of (KL-shaped) rewards, whitened over the global batch; [B, T]. REINFORCE++, arXiv:2501.03262.

    `moments` are those of the return-to-go over the whole optimizer batch, when this is a part of it.
    """
    return whiten(reward_to_go(rewards, mask, gamma=gamma), mask, moments=moments)


@torch.no_grad()
def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    pool_ids: Tensor | None = None,
    *,
    baseline: str = "leave_one_out",
    scale: str = "none",
    eps: float = 1e-6,
) -> Tensor:
    """`(score - baseline) / scale` per row, [B]: the estimator `group`.

    Args:
        baseline: "none", "group_mean" or "leave_one_out".
        scale: "none", "std" (of the group, plus eps) or "batch_std" (of the centered scores over the batch, plus eps).
    """
    require(scale in ("none", "std", "batch_std"), f"scale={scale!r} must be one of none, std, batch_std")
    centered = scores.double() - _baseline(scores.double(), group_ids, pool_ids, baseline)
    if scale == "std":
        centered = centered / (center_by_group(scores, group_ids, pool_ids)[1] + eps)
    elif scale == "batch_std" and centered.numel():
        centered = centered / (_centered_in(centered, _grouping(torch.zeros_like(centered)))[1] + eps)
    return centered.to(float_dtype(scores))


@torch.no_grad()
def optimal_advantages(
    scores: Tensor,
    group_ids: Tensor,
    pool_ids: Tensor | None = None,
    *,
    beta: float = 1.0,
) -> Tensor:
    """`R - V`, `V = beta log mean exp(R / beta)` over the group, or the pool of a group of one; [B].

    V estimates the optimal value under a KL penalty of strength beta to the policy that sampled the group: its best
    score as beta goes to 0, its mean as beta grows. Source: OAPL, arXiv:2602.19362.
    """
    require(beta > 0.0, f"beta={beta} must be positive")
    check_alike(scores=scores, group_ids=group_ids)
    wide, groups = scores.double(), _grouping(group_ids)
    pools = _grouping(torch.zeros_like(group_ids) if pool_ids is None else pool_ids)
    own, pool = (_below_optimal(wide, among, beta) for among in (groups, pools))
    return torch.where(groups.count == 1, pool, own).to(float_dtype(scores))


def _below_optimal(scores: Tensor, groups: _Grouping, beta: float) -> Tensor:
    below_best = scores + groups.minimum(-scores)
    return below_best - beta * (groups.sum((below_best / beta).exp()) / groups.count).log()


def _baseline(scores: Tensor, group_ids: Tensor, pool_ids: Tensor | None, name: str) -> Tensor:
    check_alike(scores=scores, group_ids=group_ids)
    if name == "none":
        return torch.zeros_like(scores)
    if name == "group_mean":
        return group_mean(scores, group_ids, pool_ids)
    require(name == "leave_one_out", f"baseline={name!r} must be one of none, group_mean, leave_one_out")
    return leave_one_out(scores, group_ids, pool_ids)
