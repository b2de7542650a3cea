"""What is minimised: credit for every token, its surrogate loss, its weight in the batch, statistics on the way.

    begin(rows, plan)      whole-batch facts: baselines, scales, row weights, moments
    loss(micro_batch)      estimator -> surrogate -> masks -> weighted sum; measures as it goes
    finish()               statistics of the step, summed over ranks

Every number that needs the whole batch is fixed in `begin`, so a split into micro-batches or ranks changes nothing. The
recorded behaviour log-prob is the only denominator of a ratio. The algorithms themselves are pure functions in
`streamrl.algorithms`; this class chooses between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.batch_facts import BatchFacts, batch_facts, return_moments
from learner.loss_options import check_settings, surrogate_options
from learner.packing import MicroBatch
from learner.ranks import Ranks
from learner.statistics import RATIO_CAP, Measured, add_plan, add_trajectories, measure, measure_traces
from learner.trajectories import Trajectory
from streamrl.algorithms import (
    SURROGATES,
    aggregate,
    behavior_penalty,
    broadcast_rows,
    clip_from_budget,
    lag_keep,
    log_ratios,
    loglinear_proximal,
    reinforce_pp_advantages,
    token_lags,
    veto_keep,
    vtrace_critic_free,
    whiten,
)
from streamrl.algorithms.types import ClipBounds, TokenLoss
from streamrl.config.schema import AdvantageConfig, LossConfig
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter


class Objective:
    """The training objective of one run.

    Args:
        advantage, loss: settings; checked here, so that a bad pair fails before anything is generated.
        max_new_tokens: constant normaliser of `seq-mean-token-sum-norm`.
        max_lag: the bound on the lag; 0 permits losses without any ratio.
        ranks: who shares the batch; `Ranks()` for a lone process.
        mask_old_tokens: leave tokens beyond `max_lag` out of the loss.
    Raises:
        ConfigError: unknown names, a double or a missing importance ratio, an estimator that needs a critic.
    Example:
        objective.begin(trajectories, share.plan, version=share.version)
        for micro_batch in equalize(pack(trajectories, max_tokens), ranks):
            forward_backward(policy, micro_batch, objective)
        meter = objective.finish()
    """

    def __init__(
        self, advantage: AdvantageConfig, loss: LossConfig, *, max_new_tokens: int, max_lag: int,
        ranks: Ranks, mask_old_tokens: bool = False,
    ) -> None:
        check_settings(advantage, loss, max_lag=max_lag)
        self._advantage, self._loss = advantage, loss
        self._max_new_tokens, self._max_lag, self._mask_old_tokens = max_new_tokens, max_lag, mask_old_tokens
        self._options = surrogate_options(loss)
        self._facts: BatchFacts | None = None
        self._bounds: ClipBounds | None = None
        self._observed: list[Tensor] = []
        self._version = 0
        self._meter = Meter()
        self.ranks = ranks

    @property
    def needs_policy_logprobs(self) -> bool:
        """The surrogate needs every token's current ratio before the first gradient: one more forward pass."""
        return self._loss.surrogate == "m2po"

    def begin(self, trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], *, version: int) -> None:
        """Fix what must be the same for the whole batch; a collective call.

        Args:
            trajectories: of this rank, in the order that was or will be packed.
            plan: every trajectory of the batch, on any rank.
            version: optimizer steps done before this one; lags count from it.
        Raises:
            ContentError: plan and trajectories disagree.
        """
        ranks, self._version = self.ranks, version
        self._meter, self._bounds, self._observed = Meter(), None, []
        facts = batch_facts(
            trajectories, plan, baseline=self._advantage.baseline, scale=self._advantage.scale,
            avg_level=self._loss.avg_level, max_new_tokens=self._max_new_tokens, rank=ranks.rank,
        )
        moments = facts.moments
        if self._advantage.estimator == "reinforce_pp" and self._advantage.baseline == "none":
            moments = return_moments(trajectories, ranks)
        device = ranks.device
        self._facts = BatchFacts(facts.credit.float().to(device), facts.weights.to(device), moments)
        if ranks.rank == 0:
            add_plan(self._meter, plan)
        add_trajectories(self._meter, trajectories)

    def loss(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """This micro-batch's part of the batch's loss, 0-d; parts of all micro-batches and ranks add up to it.

        Args:
            logprobs, entropy: [M] of the policy, on the device of `batch`.
        """
        assert self._facts is not None, "loss() before begin()"
        if not batch.rows:
            return logprobs.sum()  # 0, and connected to every parameter: the backward collectives must run
        mask, policy = batch.mask, batch.padded(logprobs)
        ell = log_ratios(batch.behavior_logprobs, policy, mask)
        lags = token_lags(batch.versions, self._version, mask)
        fresh, keep = self._masks(ell, lags, mask)
        advantages = self._advantages(batch, policy)
        token_loss = self._surrogate(batch, policy, advantages, lags)
        spread = batch.padded(entropy)
        losses = self._with_regularisers(token_loss.losses, batch, policy, spread)
        seen = Measured(
            mask, fresh, mask & ~keep, batch.versions, lags, ell, advantages, losses.detach(), token_loss.clipped,
            spread.detach(),
        )
        self._measure(seen)
        # Clips and vetoes would hide a broken policy: NaN must reach the gradients, so that the step is skipped.
        broken = mask & ~policy.isfinite()
        losses = torch.where(broken, policy * torch.where(broken, math.nan, 0.0), losses)
        weights = self._of_rows(self._facts.weights, batch)
        return aggregate(losses, mask, keep=keep & fresh | broken, row_weights=weights)

    def observe(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """First pass of a surrogate with `needs_policy_logprobs`: note this micro-batch's ratios and advantages."""
        if not batch.rows:
            return
        policy = batch.padded(logprobs)
        ell = log_ratios(batch.behavior_logprobs, policy, batch.mask)
        fresh, keep = self._masks(ell, token_lags(batch.versions, self._version, batch.mask), batch.mask)
        chosen = fresh & keep
        self._observed.append(torch.stack([ell[chosen], self._advantages(batch, policy)[chosen]]).double().cpu())

    def close_observation(self) -> None:
        """All micro-batches are observed: derive the clip bounds from those of all ranks; a collective call."""
        mine = torch.cat([torch.zeros(2, 0, dtype=torch.float64), *self._observed], dim=1)
        gathered = self.ranks.gather(mine.flatten().tolist())
        everyone = [torch.tensor(flat, dtype=torch.float64).view(2, -1) for flat in gathered]
        ell, advantages = torch.cat(everyone, dim=1)
        self._bounds = clip_from_budget(
            ell[None], advantages[None], torch.ones(1, ell.numel(), dtype=torch.bool), **self._options
        )
        self._observed = []

    def finish(self) -> Meter:
        """Statistics of the step over all ranks, on every rank; a collective call."""
        total = Meter()
        for totals in self.ranks.gather(self._meter.totals_for_ranks()):
            total.merge(totals)
        return total

    def _masks(self, ell: Tensor, lags: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Action tokens that are young enough, and action tokens whose trajectory passes the veto; bool [S, A]."""
        fresh = lag_keep(lags, mask, max_lag=self._max_lag) if self._mask_old_tokens else mask
        if self._loss.veto_low is None and self._loss.veto_high is None:
            return fresh, mask
        low = 0.0 if self._loss.veto_low is None else self._loss.veto_low
        high = float("inf") if self._loss.veto_high is None else self._loss.veto_high
        return fresh, veto_keep(ell, mask, low=low, high=high)

    def _advantages(self, batch: MicroBatch, policy: Tensor) -> Tensor:
        """[S, A], detached, without the token's own ratio."""
        assert self._facts is not None
        credit, settings = self._of_rows(self._facts.credit, batch), self._advantage
        if settings.estimator == "vtrace_critic_free":
            return vtrace_critic_free(
                batch.behavior_logprobs, policy.detach(), credit, torch.zeros_like(credit), batch.mask,
                lam=settings.lam, rho_bar=settings.rho_bar, c_bar=settings.c_bar,
            )
        if settings.estimator == "group":
            return broadcast_rows(credit, batch.mask)
        if settings.baseline == "none":
            return reinforce_pp_advantages(batch.rewards, batch.mask, moments=self._facts.moments)
        return whiten(broadcast_rows(credit, batch.mask), batch.mask, moments=self._facts.moments)

    def _surrogate(self, batch: MicroBatch, policy: Tensor, advantages: Tensor, lags: Tensor) -> TokenLoss:
        name, behavior, mask = self._loss.surrogate, batch.behavior_logprobs, batch.mask
        surrogate = SURROGATES[name]
        if name == "reinforce":
            return surrogate(policy, advantages, mask)
        if name == "decoupled_ppo":
            proximal = loglinear_proximal(behavior, policy.detach(), lags, mask)
            return surrogate(behavior, proximal, policy, advantages, mask, **self._options)
        if name == "m2po":
            assert self._bounds is not None, "m2po: call step.prepare() before the first forward_backward()"
            return surrogate(behavior, policy, advantages, mask, bounds=self._bounds, **self._options)
        return surrogate(behavior, policy, advantages, mask, **self._options)

    def _with_regularisers(self, losses: Tensor, batch: MicroBatch, policy: Tensor, entropy: Tensor) -> Tensor:
        if self._loss.behavior_penalty:
            tau = self._loss.behavior_penalty
            losses = losses + behavior_penalty(batch.behavior_logprobs, policy, batch.mask, tau=tau)
        if self._loss.entropy_coef:
            losses = losses - self._loss.entropy_coef * entropy
        return losses

    def _of_rows(self, per_trajectory: Tensor, batch: MicroBatch) -> Tensor:
        return per_trajectory[torch.tensor(batch.rows, device=per_trajectory.device)]

    def _measure(self, seen: Measured) -> None:
        self._meter.add("policy/num_microbatches", 1.0)
        measure(self._meter, seen, version=self._version, cap=self._loss.cap or RATIO_CAP)
        if self._advantage.estimator == "vtrace_critic_free":
            measure_traces(self._meter, seen, lam=self._advantage.lam, c_bar=self._advantage.c_bar)
