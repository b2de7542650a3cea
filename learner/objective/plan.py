"""The plan of a batch: everything that its micro-batches share, fixed before the first loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from learner.data.packing import LeaveOut, MicroBatch, places_with_gradient
from learner.data.trajectories import Trajectory
from learner.model.critic import Targets
from learner.objective import plan_tensors
from learner.objective.advantages import Advantages, RowAdvantages
from learner.objective.objective import Objective
from learner.objective.plan_tensors import MicroBatchKey, PlanTensors
from learner.objective.token_batch import EWMA, FROZEN, LagPolicy, PassOutputs, TokenBatch
from learner.ranks.mesh import Ranks
from streamrl.algorithms import log_ratios, loglinear_proximal, token_lags
from streamrl.algorithms.types import ClipBounds
from streamrl.config.schema import AdvantageBy
from streamrl.messages import PlanRow
from streamrl.weights.gpu.pinned import upload

Values = TypeVar("Values", PassOutputs, Advantages)


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The plan of one batch on one rank. A scoring pass makes a new one with what it measured.

    Attributes:
        objective: whose settings and functions it follows.
        version: optimizer steps done before this batch; lags count from it.
        recorded, batch: this rank's trajectories and the plan of all ranks', with the task's own rewards.
        rows: this rank's trajectories with the rewards that are trained on: these are to be packed.
        lag_policy: how old tokens are treated.
        options: knobs of the surrogate.
        tensors: the plan of all ranks as tensors.
        row_advantages: of this rank's trajectories, as far as no pass is needed for them.
        places: of this rank's trajectories that are to be packed.
        measured: those of them that cannot change the gradient; None if such trajectories are not told apart.
        outputs: what the scoring pass saw of each micro-batch.
        advantages: of each micro-batch, where they depend on the scoring pass.
        teacher_mean: of the log-ratio of behavior policy and teacher, where it is a baseline.
        bounds, rho_bar: of the surrogate and of V-trace, where they follow the batch.
    """

    objective: Objective
    version: int
    recorded: Sequence[Trajectory]
    batch: Sequence[PlanRow]
    rows: list[Trajectory]
    lag_policy: LagPolicy
    options: Mapping[str, Any]
    tensors: PlanTensors
    row_advantages: RowAdvantages
    places: tuple[int, ...]
    measured: frozenset[int] | None = None
    outputs: Mapping[MicroBatchKey, PassOutputs] = field(default_factory=dict)
    advantages: Mapping[MicroBatchKey, Advantages] = field(default_factory=dict)
    bounds: ClipBounds | None = None
    rho_bar: float | None = None
    teacher_mean: float = 0.0

    @classmethod
    def from_batch(
        cls, objective: Objective, trajectories: Sequence[Trajectory], batch: Sequence[PlanRow], *, version: int,
        ranks: Ranks, lag_policy: LagPolicy | None = None,
    ) -> BatchPlan:
        """Fix what must be the same for the whole batch; a collective call.

        Args:
            trajectories: of this rank.
            batch: every trajectory of the batch, on any rank.
            version: optimizer steps done before it.
            lag_policy: how old tokens are treated in this batch; None treats all alike.
        Raises:
            ContentError: batch and trajectories disagree.
        """
        lag_policy = lag_policy or LagPolicy()
        # Rules of rewards come first: every baseline must see the rewards that are trained on.
        rows, planned = list(trajectories), batch
        if objective.reward_rules is not None:
            rows, planned = objective.reward_rules.apply(trajectories, batch, ranks)
        advantage, estimator = objective.advantage, objective.estimator
        tensors = plan_tensors.of_plan(
            rows, planned, ranks, avg_level=objective.loss.avg_level, max_new_tokens=objective.max_new_tokens,
            spread_budget=lag_policy.spread_budget, filter_truncated=objective.filter_truncated,
            passed=None if objective.group_mask is None else objective.group_mask(trajectories, batch, ranks),
        )
        # An agent's siblings may be on any rank, and so may the turns that its score is the sum of.
        if advantage.by is AdvantageBy.agent:
            row_advantages = plan_tensors.agent_advantages(rows, tensors, advantage, estimator, ranks)
        else:
            row_advantages = plan_tensors.row_advantages(
                tensors, advantage, estimator, lambda: plan_tensors.return_moments(rows, advantage, ranks)
            )
        places, measured = _places(objective, rows, tensors, row_advantages, lag_policy, version)
        return cls(
            objective, version, trajectories, batch, rows, lag_policy, objective.surrogate_options, tensors,
            row_advantages, places, measured,
        )

    @property
    def left_out(self) -> list[int]:
        """Places of this rank's trajectories that get no pass at all."""
        return sorted(set(range(len(self.rows))) - set(self.places))

    @property
    def known_advantages(self) -> Tensor:
        """The advantage of all tokens of each of this rank's trajectories as far as it needs no pass, else NaN."""
        rows, estimator = self.row_advantages.advantages.float(), self.objective.estimator
        if estimator.of_rows:
            return rows
        # A centered score of 0 stays 0, whatever factor such an estimator puts on it.
        zero = (rows == 0) if estimator.scales_scores else torch.zeros_like(rows, dtype=torch.bool)
        return torch.where(zero, 0.0, math.nan)

    @property
    def oldest_lags(self) -> Tensor | None:
        """The lag at the first step beyond which a trajectory has its tokens masked, [R]; None masks none."""
        return _oldest_lags(self.tensors, self.lag_policy)

    def tokens(
        self, batch: MicroBatch, policy: Tensor, entropy: Tensor | None = None, *, version: int | None = None
    ) -> TokenBatch:
        """Per-token values [S, A] of a micro-batch under the policy's log-probs, at the optimizer step `version`."""
        objective, outputs, mask, behavior = self.objective, self.outputs_of(batch), batch.mask, batch.behavior_logprobs
        version = self.version if version is None else version
        # Lags count from this step; masks and anchors from the first one, so that no token changes its mask between.
        first = token_lags(batch.versions, self.version, mask)
        lags = first if version == self.version else token_lags(batch.versions, version, mask)
        if objective.loss.exact_at_lag_zero:
            behavior = torch.where(mask & (lags == 0), policy.detach(), behavior)
        # Without a scoring pass there is one optimizer step, and the current log-probs are those before the batch.
        assert outputs.policy is not None or version == self.version or objective.anchor not in FROZEN, (
            "an anchor has moved")
        before = policy.detach() if outputs.policy is None else outputs.policy
        proximal = None
        if objective.anchor == "loglinear":
            proximal = loglinear_proximal(behavior, before, first, mask)
        elif objective.anchor == "recomputed":
            proximal = before
        elif objective.anchor == EWMA:
            proximal = outputs.proximal
        ratios = log_ratios(behavior, policy, mask)
        return TokenBatch(batch, mask, policy, entropy, behavior, ratios, lags, first, proximal, outputs)

    def outputs_of(self, batch: MicroBatch) -> PassOutputs:
        """The scoring pass's outputs for this micro-batch; empty if there was no pass."""
        return self.outputs.get(batch.trajectory_ids, PassOutputs())

    def cut(self, whole: MicroBatch, parts: Sequence[MicroBatch]) -> BatchPlan:
        """The plan that knows of each part of a micro-batch what it knows of the whole."""
        outputs, advantages = dict(self.outputs), dict(self.advantages)
        for part, found in product(parts, (outputs, advantages)):
            if whole.trajectory_ids in found:
                rows = [whole.trajectory_ids.index(place) for place in part.trajectory_ids]
                found[part.trajectory_ids] = _rows(found[whole.trajectory_ids], rows, part.mask.shape[1])
        return replace(self, outputs=outputs, advantages=advantages)

    def critic_targets(self, batch: MicroBatch) -> Targets:
        """The critic's targets in this micro-batch."""
        found, outputs = self.advantages[batch.trajectory_ids], self.outputs_of(batch)
        old = outputs.values if outputs.action_values is None else outputs.action_values
        return Targets(found.targets, found.trained, old, found.returns)

    def of_rows(self, per_trajectory: Tensor, batch: MicroBatch) -> Tensor:
        """The values of a micro-batch's trajectories among those [R] of this rank, on the micro-batch's device."""
        return upload(per_trajectory[torch.tensor(batch.trajectory_ids)], batch.mask.device)


def _rows(values: Values, rows: Sequence[int], width: int) -> Values:
    """These trajectories' rows of tensors [S, A] and [S], of which `width` action tokens are left."""
    # The longest trajectory may be in the other part: padding that no row of this one needs goes, as `pack` makes it.
    cut = {
        one.name: None if (tensor := getattr(values, one.name)) is None else tensor[rows][..., :width]
        if tensor.dim() > 1 else tensor[rows] for one in fields(values)
    }
    return type(values)(**cut)


def _oldest_lags(tensors: PlanTensors, lag_policy: LagPolicy) -> Tensor | None:
    bound = lag_policy.mask_beyond
    return None if bound is None else tensors.head_lags.clamp(min=bound)


def _places(
    objective: Objective, rows: Sequence[Trajectory], tensors: PlanTensors, row_advantages: RowAdvantages,
    lag_policy: LagPolicy, version: int,
) -> tuple[tuple[int, ...], frozenset[int] | None]:
    """The places of trajectories that are packed, and of those among them that are only measured."""
    everything = tuple(range(len(rows)))
    if objective.leave_out is LeaveOut.NOTHING:
        return everything, None
    known = objective.estimator.of_rows or objective.estimator.scales_scores
    with_gradient = places_with_gradient(
        rows, weights=tensors.weights, advantages=row_advantages.advantages if known else None,
        oldest_lags=_oldest_lags(tensors, lag_policy), version=version,
    )
    # Without a backward pass they still have ratios, which the staleness control reads.
    if objective.leave_out is LeaveOut.BACKWARD:
        return everything, frozenset(set(everything) - set(with_gradient))
    return with_gradient, None
