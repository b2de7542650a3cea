"""The training objective: from a packed batch to one loss, and the statistics of the step.

    begin(trajectories, plan)      what depends on the whole batch: baselines, scales, row weights, moments
    [scoring pass]                 if `needs` says so: observe(micro_batch, outputs) for each, then close_observation()
    begin_step(number)             of a batch of several optimizer steps, before each
    loss(micro_batch)              advantages -> masks -> surrogate -> regularizers -> weighted sum
    finish()                       statistics of the optimizer step, summed over ranks

Every number that needs the whole batch is fixed before the first `loss`, so a split into micro-batches or ranks changes
nothing; all optimizer steps of the batch share it, and the anchor of the ratio with it. The recorded behavior log-prob
is the only denominator of a ratio. The algorithms are pure functions in `streamrl.algorithms`; this class chooses
between them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.data.selection import LeaveOut, places_with_gradient
from learner.data.trajectories import Trajectory
from learner.model.critic import Targets
from learner.objective import batch_stats
from learner.objective.advantages import Advantages, RowAdvantages, token_advantages
from learner.objective.agreements import Agreements
from learner.objective.lag_policy import LagPolicy
from learner.objective.masks import TokenMasks, token_masks
from learner.objective.options import WEIGHTED_BASELINES, anchor_of, check_settings, surrogate_options, vanishes_at_zero
from learner.objective.regularizers import Regularizers
from learner.objective.rewards import RewardRules
from learner.objective.statistics import (
    RATIO_CAP,
    LossTerms,
    add_left_out,
    add_plan,
    add_trajectories,
    measure,
    measure_traces,
)
from learner.objective.token_batch import EWMA, FROZEN, POLICY, PROXIMAL, SQUARE_NORMS, VALUES, PassOutputs, TokenBatch
from learner.ranks.mesh import Ranks
from streamrl.algorithms import aggregate, find_correction, find_estimator, find_surrogate
from streamrl.algorithms.types import ClipBounds, TokenLoss
from streamrl.config.schema import AdvantageConfig, LossConfig
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter


class Objective:
    """The training objective of one run.

    Args:
        advantage, loss: settings; checked here, so that a bad pair fails before anything is generated.
        max_new_tokens: constant normalizer of `seq-mean-token-sum-norm`.
        max_lag: the largest bound on the lag that the run may have; 0 permits losses without any ratio.
        ranks: the processes that share the batch; `Ranks()` for a lone process.
        regularizers: KL, entropy and constraints; None is what `loss` alone asks for.
        reward_rules: what a trajectory's reward is made of; None takes the task's.
        filter_truncated: trajectories that hit the length limit leave the loss and stay in their group's baseline.
        leave_out: what trajectories that cannot change the gradient go without, where no term reads them.
        steps_per_batch: optimizer steps of one batch.
    Raises:
        ConfigError: unknown names, a double or a missing importance ratio, a setting that would do nothing.
    """

    def __init__(
        self, advantage: AdvantageConfig, loss: LossConfig, *, max_new_tokens: int, max_lag: int,
        ranks: Ranks, regularizers: Regularizers | None = None, reward_rules: RewardRules | None = None,
        filter_truncated: bool = False, leave_out: LeaveOut = LeaveOut.NOTHING, steps_per_batch: int = 1,
    ) -> None:
        check_settings(advantage, loss, max_lag=max_lag, steps_per_batch=steps_per_batch)
        self._steps_per_batch = steps_per_batch
        self._advantage, self._loss = advantage, loss
        self._estimator, self._surrogate = find_estimator(advantage.estimator), find_surrogate(loss.surrogate)
        self._correction, self._anchor = find_correction(loss.correction), anchor_of(loss)
        self._options = surrogate_options(loss)
        self._max_new_tokens, self._lag_policy = max_new_tokens, LagPolicy()
        self._regularizers = regularizers or Regularizers.of_loss(loss)
        self.reward_rules, self._filter_truncated = reward_rules, filter_truncated
        self._leave_out = leave_out if self._may_leave_out else LeaveOut.NOTHING
        self._left_out: dict[int, Trajectory] = {}
        self._stats: batch_stats.BatchStats | None = None
        self._rows: RowAdvantages | None = None
        self._bounds: ClipBounds | None = None
        self._rho_bar: float | None = None
        self._outputs: dict[batch_stats.MicroBatchKey, tuple[MicroBatch, PassOutputs]] = {}
        self._advantages: dict[batch_stats.MicroBatchKey, Advantages] = {}
        self._watched: Collection[int] = ()
        self._unmeasured: list[tuple[TokenBatch, LossTerms]] = []
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._first_version = self._version = 0
        self._meter = Meter()
        self.places: tuple[int, ...] = ()
        """Places of this rank's trajectories that are to be packed."""
        self.measured: frozenset[int] | None = None
        """Those of them that cannot change the gradient; None if such trajectories are not told apart."""
        self.ranks, self.agreements = ranks, Agreements()

    @property
    def has_critic(self) -> bool:
        """The estimator needs values: build a critic, and keep the last token of truncated trajectories."""
        return self._estimator.needs_critic

    @property
    def needs(self) -> frozenset[str]:
        """What must be measured on the whole batch before the first gradient; nothing for most losses."""
        advantage, needs = self._advantage, set(self._regularizers.needs)
        if self.has_critic:
            needs |= {POLICY, VALUES}
        # Means over the batch and ratios of siblings are needed before the first token's loss.
        of_batch = advantage.whiten == "batch" or advantage.baseline in WEIGHTED_BASELINES
        if of_batch or advantage.rho_bar_ess_target is not None or self._surrogate.fit is not None:
            needs.add(POLICY)
        # What several optimizer steps share must be known of the policy before the first of them.
        if self._steps_per_batch > 1 and (self._anchor in FROZEN or "policy_logprobs" in self._estimator.inputs):
            needs.add(POLICY)
        if advantage.baseline == "opob":
            needs.add(SQUARE_NORMS)
        if self._anchor == EWMA:
            needs.add(PROXIMAL)
        return frozenset(needs)

    @property
    def _may_leave_out(self) -> bool:
        """The loss of a token without advantage is 0 and nothing else reads it."""
        # What a scoring pass measures depends on the whole batch. A mask by ratio is not known before the pass.
        # A normalized correction divides by the mean weight of a micro-batch, and a user's may read all of it.
        whole = self._correction.normalize or self._correction.function is not None
        reads = bool(self.needs) or whole or self._regularizers.reads_every_token
        return not reads and vanishes_at_zero(self._surrogate, self._options)

    def reward_rules_state(self) -> dict[str, Any]:
        """What the reward rules remember between steps, for a checkpoint."""
        return {} if self.reward_rules is None else self.reward_rules.state()

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
            version: optimizer steps done before this batch; lags count from it.
            lag_policy: how old tokens are treated in this batch; None treats all alike.
        Raises:
            ContentError: plan and trajectories disagree.
        """
        self._first_version = self._version = version
        self._lag_policy = lag_policy or LagPolicy()
        self._meter, self._bounds, self._rho_bar = Meter(), None, None
        self._outputs, self._advantages, self._left_out = {}, {}, {}
        self._watched, self._seen = (), {}
        self.agreements.begin(trajectories)
        # The entropy controller may have moved the upper clip since the last batch.
        self._options = surrogate_options(replace(self._loss, clip_high=self._regularizers.controls.clip_high))
        if self.ranks.rank == 0:
            add_plan(self._meter, plan)
        add_trajectories(self._meter, trajectories)
        if self.reward_rules is not None:
            trajectories, plan = self.reward_rules.apply(trajectories, plan, self.ranks)
        self._stats = batch_stats.of_plan(
            trajectories, plan, self.ranks, avg_level=self._loss.avg_level, max_new_tokens=self._max_new_tokens,
            spread_budget=self._lag_policy.spread_budget, filter_truncated=self._filter_truncated,
        )
        self._rows = batch_stats.row_advantages(
            self._stats, self._advantage, self._estimator,
            lambda: batch_stats.return_moments(trajectories, self._advantage, self.ranks),
        )
        self.places = self._with_gradient(trajectories)
        left_out = sorted(set(range(len(trajectories))) - set(self.places))
        if self._leave_out is LeaveOut.BACKWARD:
            self.places, self.measured, left_out = tuple(range(len(trajectories))), frozenset(left_out), []
        self._left_out = {place: trajectories[place] for place in left_out}
        self.begin_step(0)
        return list(trajectories)

    def _with_gradient(self, trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
        """Places of the trajectories that may move a parameter at the steps of their minibatch."""
        assert self._stats is not None and self._rows is not None
        everything = tuple(range(len(trajectories)))
        known = self._estimator.of_rows or self._estimator.scales_scores
        return everything if self._leave_out is LeaveOut.NOTHING else places_with_gradient(
            trajectories, weights=self._stats.weights, advantages=self._rows.advantages if known else None,
            oldest_lags=self._oldest_lags, version=self._first_version,
        )

    @property
    def _known_advantages(self) -> Tensor:
        """Of this rank's trajectories, the advantage of all their tokens as far as it needs no pass, else NaN."""
        assert self._rows is not None, "an advantage before begin()"
        rows = self._rows.advantages.float()
        if self._estimator.of_rows:
            return rows
        zero = (rows == 0) if self._estimator.scales_scores else torch.zeros_like(rows, dtype=torch.bool)
        return torch.where(zero, 0.0, math.nan)

    @property
    def _oldest_lags(self) -> Tensor | None:
        """Of this rank's trajectories, the lag at the first step beyond which tokens are masked; None masks none."""
        bound = self._lag_policy.mask_beyond
        return None if bound is None else self._stats.head_lags.clamp(min=bound)

    def begin_step(self, number: int) -> None:
        """The batch's optimizer step of this number, counted from 0, follows; `begin` is followed by number 0."""
        self._version, self._unmeasured = self._first_version + number, []
        if number:
            self._meter = Meter()
        assert self._stats is not None, "begin_step() before begin()"
        minibatch = number % self._stats.num_minibatches
        mine = (self._stats.minibatches == minibatch).nonzero()[:, 0].tolist()
        left_out, oldest_lags = [place for place in mine if place in self._left_out], self._oldest_lags
        add_left_out(
            self._meter, [self._left_out[place] for place in left_out],
            num_tokens=int(self._stats.num_tokens[self._stats.places[mine]].sum()), version=self._version,
            advantages=self._known_advantages[left_out],
            oldest_lags=None if oldest_lags is None else oldest_lags[left_out] + number,
        )

    # --- the scoring pass ---------------------------------------------------------------------------------------

    def observe(self, batch: MicroBatch, outputs: PassOutputs) -> None:
        """Note the networks' outputs on this micro-batch before the update."""
        if batch.trajectory_ids:
            self._outputs[batch.trajectory_ids] = batch, outputs

    def close_observation(self) -> None:
        """All micro-batches are observed: fix what depends on all of them; a collective call."""
        if POLICY not in self.needs:
            return
        assert self._stats is not None, "close_observation() before begin()"
        advantage, estimator, regularizers, ranks = self._advantage, self._estimator, self._regularizers, self.ranks
        observed = [self._tokens(batch, outputs.policy) for batch, outputs in self._outputs.values()]
        # The order matters: rewards are shaped before a baseline looks at them, and advantages are whitened last.
        if regularizers.shapes_rewards:
            penalties = self._stats.gather(observed, regularizers.row_penalties, ranks)  # KL of whole trajectories
            self._stats = replace(self._stats, scores=self._stats.scores - penalties)
            self._rows = batch_stats.row_advantages(
                self._stats, advantage, estimator,
                lambda: batch_stats.shaped_moments(advantage, estimator, observed, regularizers, ranks),
            )
        if advantage.baseline in WEIGHTED_BASELINES:
            self._rows = batch_stats.weighted_row_advantages(self._stats, advantage, observed, ranks)
        target = advantage.rho_bar_ess_target
        if target is not None:
            self._rho_bar = batch_stats.fitted_rho_bar(self._stats, observed, ranks, target=target)
            self._meter.add("control/rho_bar", self._rho_bar)
        self._advantages = {tokens.micro.trajectory_ids: self._estimated(tokens) for tokens in observed}
        if advantage.whiten == "batch":
            self._advantages = batch_stats.whitened(self._advantages, observed, ranks)
        if self._surrogate.fit is not None:
            trusted = [self._trusted(tokens) for tokens in observed]
            self._bounds = batch_stats.fitted_bounds(self._surrogate.fit, trusted, ranks, self._options)

    def outputs(self, batch: MicroBatch) -> PassOutputs:
        """What the scoring pass saw of this micro-batch; nothing if there was none."""
        return self._outputs.get(batch.trajectory_ids, (batch, PassOutputs()))[1]

    def critic_targets(self, batch: MicroBatch) -> Targets:
        """What this micro-batch trains the critic on."""
        found, outputs = self._advantages[batch.trajectory_ids], self.outputs(batch)
        old = outputs.values if outputs.action_values is None else outputs.action_values
        return Targets(found.targets, found.trained, old)

    def _trusted(self, tokens: TokenBatch) -> Tensor:
        """Log-ratios and advantages [2, n] of the tokens that no mask removes."""
        advantages = self._advantages_of(tokens)
        keep = self._masks(tokens, advantages).keep
        return torch.stack([tokens.log_ratios[keep], advantages[keep]])

    # --- the loss -----------------------------------------------------------------------------------------------

    def loss(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """This micro-batch's part of the batch's loss, 0-d, from [M] of the policy; all parts on all ranks add up."""
        assert self._stats is not None, "loss() before begin()"
        if not batch.trajectory_ids:
            return logprobs.sum()  # 0, and connected to every parameter: the backward collectives must run
        # One row a trajectory from here on: masks, corrections and row weights are about whole trajectories.
        tokens = self._tokens(batch, batch.padded(logprobs), batch.padded(entropy))
        terms = self._terms(tokens)
        self._unmeasured.append((tokens.detached(), terms.detached()))  # read when no pass waits for it
        self._watch(tokens, terms)
        # Clips and vetoes would hide a broken policy: NaN must reach the gradients, so that the step is skipped.
        broken = tokens.mask & ~tokens.policy.isfinite()
        losses = torch.where(broken, tokens.policy * torch.where(broken, math.nan, 0.0), terms.losses)
        weights = self._of_rows(self._stats.weights, batch)
        return aggregate(losses, tokens.mask, keep=terms.masks.keep | broken, row_weights=weights)

    def _terms(self, tokens: TokenBatch) -> LossTerms:
        """The pipeline: every stage reads the tokens and what the stages above it gave."""
        advantages = self._advantages_of(tokens)
        masks = self._masks(tokens, advantages)
        surrogate = self._surrogate_losses(tokens, advantages)
        # A correction weighs the policy term alone; regularizers come after, with weights of their own.
        losses = surrogate.losses if masks.weights is None else masks.weights * surrogate.losses
        lag_weights = self._lag_policy.weights(tokens.first_lags, tokens.mask)
        if lag_weights is not None:
            losses = losses * lag_weights
        losses = self._regularizers.regularized(losses, tokens)
        return LossTerms(advantages, masks, lag_weights, surrogate.clipped, losses)

    def _tokens(self, batch: MicroBatch, policy: Tensor | None, entropy: Tensor | None = None) -> TokenBatch:
        assert policy is not None, "the scoring pass brought no log-probs of the policy"
        return TokenBatch.of(
            batch, policy, entropy, self.outputs(batch), version=self._version, first_version=self._first_version,
            anchor=self._anchor,
        )

    def _advantages_of(self, tokens: TokenBatch) -> Tensor:
        """[S, A], detached, as the surrogate multiplies them: those of the scoring pass, if there was one."""
        found = self._advantages.get(tokens.micro.trajectory_ids) or self._estimated(tokens)
        return self._regularizers.shaped_advantages(found.advantages, tokens)

    def _estimated(self, tokens: TokenBatch) -> Advantages:
        """Advantages by the estimator, without the token's own ratio, and the critic's targets."""
        assert self._rows is not None, "an estimator before begin()"
        rewards = self._regularizers.shaped_rewards(tokens)
        return token_advantages(
            self._advantage, self._estimator, tokens, self._rows.of(tokens.micro), rewards, rho_bar=self._rho_bar
        )

    def _masks(self, tokens: TokenBatch, advantages: Tensor) -> TokenMasks:
        assert self._stats is not None, "a mask before begin()"
        head_lags = self._of_rows(self._stats.head_lags, tokens.micro)
        return token_masks(self._loss, self._correction, self._lag_policy, tokens, advantages, head_lags)

    def _surrogate_losses(self, tokens: TokenBatch, advantages: Tensor) -> TokenLoss:
        needs_bounds = self._surrogate.fit is not None
        assert self._bounds is not None or not needs_bounds, "run score_batch() before the first forward_backward()"
        return self._surrogate({
            "policy_logprobs": tokens.policy, "behavior_logprobs": tokens.behavior,
            "proximal_logprobs": tokens.proximal,
            "anchor_logprobs": tokens.behavior if tokens.proximal is None else tokens.proximal,
            "advantages": advantages, "mask": tokens.mask, "lags": tokens.lags, "bounds": self._bounds,
        }, **self._options)

    def _of_rows(self, per_trajectory: Tensor, batch: MicroBatch) -> Tensor:
        return per_trajectory[torch.tensor(batch.trajectory_ids)].to(batch.mask.device)

    # --- single trajectories ------------------------------------------------------------------------------------

    def watch(self, places: Collection[int]) -> None:
        """Note ratios and advantages of the trajectories at these places, as they are first trained on."""
        self._watched = places
        none = torch.zeros(0)
        known = {place: self._known_advantages[place] for place in places if place in self._left_out}
        self._seen = {
            place: (none, advantage.expand(self._left_out[place].num_action_tokens))
            for place, advantage in known.items() if not advantage.isnan()
        }

    def watched(self, place: int, num_tokens: int) -> tuple[list[float], list[float]]:
        """Ratios pi/mu and advantages of the trajectory's action tokens; no ratios if it got no pass."""
        if place not in self._seen:
            return [], []
        log_ratios, advantages = self._seen[place]
        return log_ratios[:num_tokens].exp().tolist(), advantages[:num_tokens].tolist()

    def _watch(self, tokens: TokenBatch, terms: LossTerms) -> None:
        for row, place in enumerate(tokens.micro.trajectory_ids):
            if place in self._watched and place not in self._seen:
                # Copied where they are: fetching them here would wait for the device.
                self._seen[place] = tokens.log_ratios[row].detach().clone(), terms.advantages[row].detach().clone()

    # --- statistics ---------------------------------------------------------------------------------------------

    def finish(self) -> Meter:
        """Statistics of the optimizer step over all ranks, on every rank; a collective call.

        What is measured once a batch is among those of its first step.
        """
        for tokens, terms in self._unmeasured:
            self._measure(tokens, terms)
        self._unmeasured = []
        # Sums and counts are gathered, never means: ranks train different numbers of tokens.
        total = Meter()
        for totals in self.ranks.gather(self._meter.totals_for_ranks()):
            total.merge(totals)
        return total

    def _measure(self, tokens: TokenBatch, terms: LossTerms) -> None:
        advantage, estimator, micro = self._advantage, self._estimator, tokens.micro
        self.agreements.measure(tokens)
        whole = micro.num_tokens + micro.num_shared
        self._meter.add("policy/num_microbatches", 1.0)
        self._meter.add("policy/shared_fraction", micro.num_shared / whole, whole)
        self._regularizers.measure(self._meter, tokens, terms.masks.keep)
        measure(self._meter, tokens, terms, version=self._version, cap=self._loss.cap or RATIO_CAP)
        if {"lam", "c_bar"} <= estimator.knobs and not estimator.of_segments:  # a trace from token to token
            measure_traces(self._meter, tokens, lam=advantage.lam, c_bar=advantage.c_bar)
