"""From a batch to the loss of an arm, through `streamrl.algorithms` only: estimator, surrogate, masks, aggregation.

Rows of all members are stacked, [E R, L], because almost every function works on rows. What needs a whole batch (ESS,
whitening, the M2PO budget, row weights) is computed for each member apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.pieces import ess_report
from bench.staleness.arms import Arm
from streamrl.algorithms import (
    ESTIMATORS,
    SURROGATES,
    Returns,
    TokenLoss,
    aggregation_weights,
    broadcast_rows,
    leave_one_out,
    loglinear_proximal,
    opsm_keep,
    place_terminal,
    veto_keep,
    whiten,
)

ESS_FIELDS = ("token", "sequence", "sequence_clipped", "mean_token_weight", "kept_fraction")


@dataclass(frozen=True, slots=True)
class Rows:
    """One batch of every member, rows stacked: `num_members` runs of equally many rows."""

    num_members: int
    behavior_logprobs: Tensor  # [E R, L] the denominator
    lags: Tensor  # int64 [E R, L]
    scores: Tensor  # [E R]
    group_ids: Tensor  # int64 [E R], different in every member
    mask: Tensor  # bool [E R, L], False on rows that a filter removed before the cut

    def by_member(self, tensor: Tensor) -> Tensor:
        """[E R, ...] as [E, R, ...]."""
        return tensor.unflatten(0, (self.num_members, -1))


def filtered(arm: Arm, rows: Rows) -> Rows:
    """The batch without groups that teach nothing, if the arm filters them."""
    if not arm.filter_zero_std:
        return rows
    informative = has_contrast(rows.scores, rows.group_ids)
    return Rows(rows.num_members, rows.behavior_logprobs, rows.lags, rows.scores, rows.group_ids,
                rows.mask & informative[:, None])  # fmt: skip


def has_contrast(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Rows of groups whose scores differ, bool [R]: unbiased std >= 1e-6."""
    _, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    wide = scores.double()
    lowest = wide.new_full(sizes.shape, torch.inf).scatter_reduce_(0, index, wide, "amin")
    above = wide - lowest[index]  # exactly 0 for equal scores
    mean = torch.zeros_like(lowest).index_add_(0, index, above) / sizes
    squares = torch.zeros_like(lowest).index_add_(0, index, (above - mean[index]).square())
    return ((squares / (sizes - 1)).sqrt() >= 1e-6)[index]


def estimate(arm: Arm, rows: Rows, policy: Tensor, values: Tensor | None) -> Returns:
    """Advantages [E R, L] without own ratio (unless the arm says so) and, with a critic, its targets.

    `policy` [E R, L] log-probs, detached; `values` [E R, L] or None.
    """
    name, mask = arm.estimator, rows.mask
    estimator = ESTIMATORS[name]
    if name == "group":
        per_row = estimator(rows.scores, rows.group_ids, baseline=arm.baseline, scale=arm.scale)
        return Returns(advantages=broadcast_rows(per_row, mask), targets=torch.zeros_like(policy))
    if name == "vtrace_critic_free":
        baselines = leave_one_out(rows.scores, rows.group_ids)
        advantages = estimator(
            rows.behavior_logprobs, policy, rows.scores, baselines, mask, rho_bar_pg=arm.rho_bar_pg
        )
        return Returns(advantages=advantages, targets=torch.zeros_like(policy))
    # A critic of states: the targets of Retrace carry the own ratio too.
    knobs = {"rho_bar_pg": arm.rho_bar_pg} if name == "vtrace" else {"target_rho_bar": 1.0}
    result = estimator(
        rows.behavior_logprobs, policy, place_terminal(rows.scores, mask), values, mask,
        bootstrap_values=torch.zeros_like(rows.scores), **knobs,
    )
    if arm.whiten != "batch":
        return result
    apart = torch.func.vmap(whiten)(rows.by_member(result.advantages), rows.by_member(mask))
    return Returns(advantages=apart.flatten(0, 1), targets=result.targets)


def surrogate(arm: Arm, rows: Rows, policy: Tensor, advantages: Tensor) -> TokenLoss:
    """The arm's loss per token, differentiable in `policy` [E R, L]."""
    function, knobs = SURROGATES[arm.surrogate], arm.knobs
    behavior, mask = rows.behavior_logprobs, rows.mask
    if arm.surrogate == "reinforce":
        return function(policy, advantages, mask)
    if arm.surrogate == "decoupled_ppo":
        proximal = loglinear_proximal(behavior, policy.detach(), rows.lags, mask)
        return function(behavior, proximal, policy, advantages, mask, **knobs)
    if arm.surrogate == "m2po":  # its clip belongs to one batch, that is, to one member
        columns = [rows.by_member(t).unbind(0) for t in (behavior, policy, advantages, mask)]
        parts = [function(*batch, **knobs) for batch in zip(*columns, strict=True)]
        return TokenLoss(losses=torch.cat([p.losses for p in parts]), clipped=torch.cat([p.clipped for p in parts]))
    return function(behavior, policy, advantages, mask, **knobs)


def keep(arm: Arm, rows: Rows, log_ratios: Tensor, advantages: Tensor, drift_exceeded: Tensor) -> Tensor:
    """Tokens that the arm's masks leave in the sum, bool [E R, L]; `drift_exceeded` bool [E]: m2 exceeds its target."""
    kept = rows.mask
    if arm.veto_low is not None and arm.veto_high is not None:
        kept = kept & veto_keep(log_ratios, rows.mask, low=arm.veto_low, high=arm.veto_high)
    if arm.opsm_delta is not None:
        fresh_enough = opsm_keep(log_ratios, advantages, rows.mask, delta=arm.opsm_delta)
        acting = drift_exceeded if arm.opsm_drift_only else torch.ones_like(drift_exceeded)
        idle = ~acting.repeat_interleave(log_ratios.shape[0] // rows.num_members)[:, None]
        kept = kept & (fresh_enough | idle)
    return kept


def row_weights(arm: Arm, rows: Rows) -> Tensor:
    """Weight of every row in its own member's batch, [E R]."""
    counts = rows.by_member(rows.mask.sum(1).float())
    return torch.func.vmap(partial(aggregation_weights, mode=arm.aggregation))(counts).flatten()


def ess_by_member(rows: Rows, log_ratios: Tensor, mask: Tensor, kept: Tensor) -> Tensor:
    """ESS_FIELDS of every member over the kept tokens, [E, len(ESS_FIELDS)]; 0 where nothing is kept."""

    def of_member(ratios: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
        report = ess_report(ratios, tokens, keep=chosen)
        return torch.stack([getattr(report, name) for name in ESS_FIELDS])

    return torch.func.vmap(of_member)(rows.by_member(log_ratios), rows.by_member(mask), rows.by_member(kept))
