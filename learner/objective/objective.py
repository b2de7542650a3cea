"""What is minimized: credit for every token, its surrogate loss, its weight in the batch, statistics on the way.

    begin(rows, plan)      whole-batch facts: baselines, scales, row weights, moments
    [scoring pass]         if `needs` says so: observe(micro_batch, scored) for each, then close_observation()
    loss(micro_batch)      credit -> guards -> surrogate -> regularizers -> weighted sum; measures as it goes
    finish()               statistics of the step, summed over ranks

Every number that needs the whole batch is fixed before the first `loss`, so a split into micro-batches or ranks changes
nothing. The recorded behavior log-prob is the only denominator of a ratio. The algorithms themselves are pure
functions in `streamrl.algorithms`; this class chooses between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.data.trajectories import Trajectory
from learner.mesh import Ranks
from learner.model.critic import Targets
from learner.objective.advantages import CRITIC_FREE, Advantages, credit_tokens
from learner.objective.batch_passes import (
    ObservedBatch,
    Rows,
    fitted_clip,
    fitted_rho_bar,
    plain_credit,
    shaped_facts,
    shaped_moments,
    weighted_credit,
    whitened,
)
from learner.objective.batch_stats import WEIGHTED_BASELINES, BatchFacts, RowCredit, batch_facts, return_moments
from learner.objective.lag_policy import LagPolicy
from learner.objective.loss_options import check_settings, surrogate_options
from learner.objective.masks import TokenMasks, guard
from learner.objective.regularizers import Regularizers
from learner.objective.rewards import RewardRules
from learner.objective.scoring_pass import POLICY, PROXIMAL, SQUARE_NORMS, VALUES, PassOutputs
from learner.objective.statistics import RATIO_CAP, LossStatistics, add_plan, add_trajectories, measure, measure_traces
from learner.objective.surrogate import EWMA, anchor_of, proximal_logprobs, surrogate_loss
from streamrl.algorithms import CORRECTION_PRESETS, aggregate, log_ratios, token_lags
from streamrl.algorithms.types import ClipBounds, Moments
from streamrl.config.schema import AdvantageConfig, Discount, LossConfig
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter


class Objective:
    """The training objective of one run.

    Args:
        advantage, loss: settings; checked here, so that a bad pair fails before anything is generated.
        max_new_tokens: constant normalizer of `seq-mean-token-sum-norm`.
        max_lag: the largest bound on the lag that the run may have; 0 permits losses without any ratio.
        ranks: who shares the batch; `Ranks()` for a lone process.
        regularizers: KL, entropy and constraints; None is what `loss` alone asks for.
        reward_rules: what a trajectory's reward is made of; None takes the task's.
        filter_truncated: trajectories that hit the length limit leave the loss and stay in their group's baseline.
    Raises:
        ConfigError: unknown names, a double or a missing importance ratio, a setting that would do nothing.
    Example:
        objective.begin(trajectories, share.plan, version=share.version)
        micro_batches = equalize(pack(trajectories, max_tokens, bootstrap=objective.has_critic), ranks)
        score_batch(policy, micro_batches, objective, critic=critic)
        for micro_batch in micro_batches:
            forward_backward(policy, micro_batch, objective)
        meter = objective.finish()
    """

    def __init__(
        self, advantage: AdvantageConfig, loss: LossConfig, *, max_new_tokens: int, max_lag: int,
        ranks: Ranks, regularizers: Regularizers | None = None, reward_rules: RewardRules | None = None,
        filter_truncated: bool = False,
    ) -> None:
        check_settings(advantage, loss, max_lag=max_lag)
        self._advantage, self._loss = advantage, loss
        self._max_new_tokens, self._lag_policy = max_new_tokens, LagPolicy()
        self._options = surrogate_options(loss)
        self._regularizers = regularizers or Regularizers.of_loss(loss)
        self._anchor = anchor_of(loss.surrogate, loss.anchor)
        self._reward_rules, self._filter_truncated = reward_rules, filter_truncated
        self._facts: BatchFacts | None = None
        self._credit: RowCredit | None = None
        self._bounds: ClipBounds | None = None
        self._rho_bar: float | None = None
        self._seen: dict[Rows, ObservedBatch] = {}
        self._credited: dict[Rows, Advantages] = {}
        self._version = 0
        self._meter = Meter()
        self.ranks = ranks

    @property
    def has_critic(self) -> bool:
        """The estimator needs values: build a critic, and keep the last token of truncated trajectories."""
        return self._advantage.estimator not in CRITIC_FREE

    @property
    def needs(self) -> frozenset[str]:
        """What must be measured on the whole batch before the first gradient; nothing for most losses."""
        advantage, needs = self._advantage, set(self._regularizers.needs)
        if self.has_critic:
            needs |= {POLICY, VALUES}
        if advantage.whiten == "batch" or advantage.baseline in WEIGHTED_BASELINES:
            needs.add(POLICY)
        if advantage.rho_bar_ess_target is not None or self._loss.surrogate == "m2po":
            needs.add(POLICY)
        if advantage.baseline == "opob":
            needs.add(SQUARE_NORMS)
        if self._anchor == EWMA:
            needs.add(PROXIMAL)
        return frozenset(needs)

    def reward_rules_state(self) -> dict[str, Any]:
        """What the score rules remember between steps, for a checkpoint."""
        return {} if self._reward_rules is None else self._reward_rules.state()

    def begin(
        self, trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], *, version: int,
        lag_policy: LagPolicy | None = None,
    ) -> list[Trajectory]:
        """Fix what must be the same for the whole batch; a collective call.

        Returns:
            The trajectories with the rewards that are trained on: these are to be packed.

        Args:
            trajectories: of this rank, in the order that was or will be packed.
            plan: every trajectory of the batch, on any rank.
            version: optimizer steps done before this one; lags count from it.
            lag_policy: what becomes of old tokens in this step; None treats all ages alike.
        Raises:
            ContentError: plan and trajectories disagree.
        """
        self._version, self._lag_policy = version, lag_policy or LagPolicy()
        self._meter, self._bounds, self._rho_bar = Meter(), None, None
        self._seen, self._credited = {}, {}
        self._options = surrogate_options(replace(self._loss, clip_high=self._regularizers.controls.clip_high))
        if self.ranks.rank == 0:
            add_plan(self._meter, plan)
        add_trajectories(self._meter, trajectories)
        if self._reward_rules is not None:
            trajectories, plan = self._reward_rules.apply(trajectories, plan, self.ranks)
        left_out = _everyones_truncated(trajectories, plan, self.ranks) if self._filter_truncated else None
        self._facts = batch_facts(
            trajectories, plan, left_out=left_out, avg_level=self._loss.avg_level, max_new_tokens=self._max_new_tokens,
            rank=self.ranks.dp_rank, spread_budget=self._lag_policy.spread_budget,
        )
        self._credit = plain_credit(self._advantage, self._facts, lambda: self._return_moments(trajectories))
        return list(trajectories)

    # --- the scoring pass ---------------------------------------------------------------------------------------

    def observe(self, batch: MicroBatch, scored: PassOutputs) -> None:
        """Note what the networks say of this micro-batch before the update."""
        if batch.trajectory_ids:
            self._seen[batch.trajectory_ids] = ObservedBatch(batch, scored)

    def close_observation(self) -> None:
        """All micro-batches are observed: fix what depends on all of them; a collective call."""
        if POLICY not in self.needs:
            return
        assert self._facts is not None
        advantage, seen, pulls, ranks = self._advantage, self._seen.values(), self._regularizers, self.ranks
        if pulls.shapes_rewards:
            self._facts = shaped_facts(self._facts, seen, pulls, ranks)
            self._credit = plain_credit(advantage, self._facts, lambda: shaped_moments(advantage, seen, pulls, ranks))
        if advantage.baseline in WEIGHTED_BASELINES:
            self._credit = weighted_credit(advantage, self._facts, seen, ranks)
        if advantage.rho_bar_ess_target is not None:
            self._rho_bar = fitted_rho_bar(self._facts, seen, ranks, target=advantage.rho_bar_ess_target)
            self._meter.add("control/rho_bar", self._rho_bar)
        self._credited = {rows: self._credit_of(one.batch, one.scored.policy) for rows, one in self._seen.items()}
        if advantage.whiten == "batch":
            self._credited = whitened(self._credited, self._seen, ranks)
        if self._loss.surrogate == "m2po":
            self._bounds = fitted_clip([self._trusted(one) for one in seen], ranks, self._options)

    def critic_targets(self, batch: MicroBatch) -> Targets:
        """What this micro-batch teaches the critic."""
        credited, scored = self._credited[batch.trajectory_ids], self._scored(batch)
        old = scored.values if scored.action_values is None else scored.action_values
        return Targets(credited.targets, credited.trained, old)

    def _return_moments(self, trajectories: Sequence[Trajectory]) -> Moments:
        gamma, at_turns = self._advantage.gamma, self._advantage.discount is Discount.turn
        return return_moments(trajectories, self.ranks, gamma=gamma, at_turns=at_turns)

    def _trusted(self, one: ObservedBatch) -> Tensor:
        """Log-ratios and advantages [2, n] of the tokens that no guard removes."""
        ell, advantages = one.log_ratios, self._advantages(one.batch, one.scored.policy)
        chosen = self._guard(one.batch, ell, advantages, None).keep
        return torch.stack([ell[chosen], advantages[chosen]])

    def _scored(self, batch: MicroBatch) -> PassOutputs:
        """What the scoring pass saw of this micro-batch; nothing if there was none."""
        seen = self._seen.get(batch.trajectory_ids)
        return PassOutputs() if seen is None else seen.scored

    # --- the loss -----------------------------------------------------------------------------------------------

    def loss(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """This micro-batch's part of the batch's loss, 0-d; parts of all micro-batches and ranks add up to it.

        Args:
            logprobs, entropy: [M] of the policy, on the device of `batch`.
        """
        assert self._facts is not None, "loss() before begin()"
        if not batch.trajectory_ids:
            return logprobs.sum()  # 0, and connected to every parameter: the backward collectives must run
        mask, policy = batch.mask, batch.padded(logprobs)
        ell, lags = self._ell(batch, policy), token_lags(batch.versions, self._version, mask)
        scored = self._scored(batch)
        advantages = self._advantages(batch, policy.detach())
        proximal = proximal_logprobs(
            self._anchor, batch, policy, lags, before=scored.policy, average=scored.proximal
        )
        guarded = self._guard(batch, ell, advantages, proximal)
        token_loss = surrogate_loss(
            self._loss.surrogate, self._options, batch, policy, advantages, proximal=proximal, bounds=self._bounds
        )
        losses = token_loss.losses if guarded.weights is None else guarded.weights * token_loss.losses
        discounts_of_age = self._lag_policy.weights(lags, mask)
        if discounts_of_age is not None:
            losses = losses * discounts_of_age
            tokens = float(mask.sum())
            self._meter.add("lag/weight", float(discounts_of_age.sum()) / max(1.0, tokens), tokens)
        spread = batch.padded(entropy)
        losses = self._regularizers.added_to(losses, batch, policy, spread, scored)
        self._regularizers.measure(self._meter, batch, policy.detach(), scored, guarded.keep)
        self._measure(LossStatistics(
            mask, guarded.keep, guarded.removed, batch.versions, lags, ell, advantages, losses.detach(),
            token_loss.clipped, spread.detach(),
        ))
        # Clips and vetoes would hide a broken policy: NaN must reach the gradients, so that the step is skipped.
        broken = mask & ~policy.isfinite()
        losses = torch.where(broken, policy * torch.where(broken, math.nan, 0.0), losses)
        weights = self._of_rows(self._facts.weights, batch)
        return aggregate(losses, mask, keep=guarded.keep | broken, row_weights=weights)

    def finish(self) -> Meter:
        """Statistics of the step over all ranks, on every rank; a collective call."""
        total = Meter()
        for totals in self.ranks.gather(self._meter.totals_for_ranks()):
            total.merge(totals)
        return total

    def _ell(self, batch: MicroBatch, policy: Tensor) -> Tensor:
        return log_ratios(batch.behavior_logprobs, policy, batch.mask)

    def _guard(self, batch: MicroBatch, ell: Tensor, advantages: Tensor, proximal: Tensor | None) -> TokenMasks:
        decoupled = CORRECTION_PRESETS[self._loss.correction].mode == "decoupled"
        lags, loss = token_lags(batch.versions, self._version, batch.mask), self._loss
        if loss.opsm_delta is not None:
            loss = replace(loss, opsm_delta=loss.opsm_delta * self._lag_policy.opsm_scale)
        return guard(
            loss, ell, advantages, lags, batch.mask, oldest=self._oldest(batch),
            proximal_ratios=self._ell(batch, proximal) if decoupled and proximal is not None else None,
            drift_exceeded=self._lag_policy.drift_exceeded, lag_m2=self._lag_policy.expected_m2(lags),
        )

    def _oldest(self, batch: MicroBatch) -> Tensor | None:
        """[S, 1] largest lag to train; a group that was leased under a wider bound than today's keeps that."""
        if self._lag_policy.mask_beyond is None:
            return None
        assert self._facts is not None, "a guard before begin()"
        return self._of_rows(self._facts.head_lags, batch).clamp(min=self._lag_policy.mask_beyond)[:, None]

    def _advantages(self, batch: MicroBatch, policy: Tensor) -> Tensor:
        """[S, A], detached, as the surrogate multiplies them."""
        credited = self._credited.get(batch.trajectory_ids) or self._credit_of(batch, policy)
        return self._regularizers.shaped_advantages(credited.advantages, batch, policy, self._scored(batch))

    def _credit_of(self, batch: MicroBatch, policy: Tensor) -> Advantages:
        """Advantages [S, A], detached, without the token's own ratio, and the critic's targets."""
        assert self._credit is not None
        scored = self._scored(batch)
        return credit_tokens(
            self._advantage, batch, policy, self._of_rows(self._credit.credit.float(), batch),
            row_baseline=self._of_rows(self._credit.baseline.float(), batch), rho_bar=self._rho_bar,
            rewards=self._regularizers.shaped_rewards(batch, scored), moments=self._credit.moments, scored=scored,
        )

    def _of_rows(self, per_trajectory: Tensor, batch: MicroBatch) -> Tensor:
        return per_trajectory[torch.tensor(batch.trajectory_ids)].to(batch.mask.device)

    def _measure(self, seen: LossStatistics) -> None:
        self._meter.add("policy/num_microbatches", 1.0)
        measure(self._meter, seen, version=self._version, cap=self._loss.cap or RATIO_CAP)
        if self._advantage.estimator in ("vtrace_critic_free", "vtrace"):
            measure_traces(self._meter, seen, lam=self._advantage.lam, c_bar=self._advantage.c_bar)


def _everyones_truncated(trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], ranks: Ranks) -> Tensor:
    """bool [P], in the plan's order; a collective call."""
    place_of = {(row.group_id, row.index): i for i, row in enumerate(plan)}
    mine = [float(place_of[row.group_id, row.index]) for row in trajectories if row.truncated]
    whole = torch.zeros(len(plan), dtype=torch.bool)
    for places in ranks.gather(mine):
        whole[[int(place) for place in places]] = True
    return whole
