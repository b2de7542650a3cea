"""The loss of one micro-batch, from its tokens down to one number.

    advantages   by the estimator, or from the scoring pass            `advantages`
    masks        tokens that are too far off-policy to train on, by cause, and weights of corrections
        lag       tokens older than the bound                               staleness.mode=mask_old_tokens
        veto      trajectories with one impossible ratio, or what follows   loss.veto_low, loss.veto_high, loss.veto_kl
        opsm      harmful tokens of trajectories that drifted away          loss.opsm_delta
        zscore    harmful tokens far outside what their lag explains        loss.zscore_bound
        rejected  trajectories that the correction preset turns away        loss.correction
    surrogate    the policy term, by name                              `streamrl.algorithms`
    regularizers KL, entropy, behavior penalty, constraints            `regularizers`

A masked token leaves the sum but not the denominator of the loss: what is left is never inflated. Masks combine freely;
weights do not (`check_pairing`).

Legend: S trajectories of a micro-batch, A most action tokens of one, M action tokens of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.objective.advantages import Advantages, discounts, turn_ends
from learner.objective.options import ESTIMATOR_SETTINGS
from learner.objective.plan import BatchPlan
from learner.objective.token_batch import TokenBatch
from streamrl.algorithms import (
    Estimator,
    aggregate,
    apply_correction,
    broadcast_rows,
    lag_keep,
    log_ratios,
    n_step,
    opsm_keep,
    place_terminal,
    veto_keep,
    whiten,
    zscore_keep,
)
from streamrl.algorithms.types import Correction, CorrectionSpec, Returns, SegmentReturns
from streamrl.config.schema import AdvantageConfig, LossConfig, OpsmWhen, Segment, VetoScope, VetoStat


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """The results of the loss's stages for one micro-batch; all [S, A]."""

    advantages: Tensor  # detached
    masks: TokenMasks
    lag_weights: Tensor | None  # factors on the losses of old tokens; None if all are 1
    clipped: Tensor  # bool, the trust region removed or bounded the token's gradient
    losses: Tensor  # differentiable, every weight applied and every regularizer added

    def detached(self) -> LossTerms:
        """The same values without the graph that they came from."""
        return replace(self, losses=self.losses.detach())


def policy_term(tokens: TokenBatch, plan: BatchPlan) -> LossTerms:
    """The losses before any regularizer: a function of the policy's log-probs alone."""
    objective = plan.objective
    assert plan.bounds is not None or objective.surrogate.fit is None, "run score_batch() before the first loss"
    advantages = shaped_advantages(tokens, plan)
    masks = token_masks(tokens, plan, advantages)
    # Every input that a surrogate may name; the entry picks the parameters of its function.
    surrogate = objective.surrogate({
        "policy_logprobs": tokens.policy, "behavior_logprobs": tokens.behavior, "proximal_logprobs": tokens.proximal,
        "anchor_logprobs": tokens.behavior if tokens.proximal is None else tokens.proximal,
        "advantages": advantages, "mask": tokens.mask, "lags": tokens.lags, "bounds": plan.bounds,
    }, **plan.options)
    losses = surrogate.losses if masks.weights is None else masks.weights * surrogate.losses
    lag_weights = plan.lag_policy.weights(tokens.first_lags, tokens.mask)
    if lag_weights is not None:
        losses = losses * lag_weights
    return LossTerms(advantages, masks, lag_weights, surrogate.clipped, losses)


def micro_batch_loss(
    batch: MicroBatch, logprobs: Tensor, entropy: Tensor, plan: BatchPlan, *, version: int | None = None,
    note: Callable[[TokenBatch, LossTerms], None] = lambda tokens, terms: None,
) -> Tensor:
    """This micro-batch's part of the batch's loss, 0-d, from [M] of the policy; all parts on all ranks add up.

    Args:
        version: of the optimizer step that it is for; None is the first of the batch.
        note: called with the tokens and their losses.
    """
    if not batch.trajectory_ids:
        return logprobs.sum()  # 0, and connected to every parameter: the backward collectives must run
    # One row a trajectory from here on: masks, corrections and row weights are about whole trajectories.
    tokens = plan.tokens(batch, batch.padded(logprobs), batch.padded(entropy), version=version)
    terms = policy_term(tokens, plan)
    # A correction weighs the policy term alone; regularizers come after, with weights of their own.
    terms = replace(terms, losses=plan.objective.regularizers.regularized(terms.losses, tokens))
    note(tokens, terms)
    # Clips and vetoes would hide a broken policy: NaN must reach the gradients, so that the step is skipped.
    broken = tokens.mask & ~tokens.policy.isfinite()
    losses = torch.where(broken, tokens.policy * torch.where(broken, math.nan, 0.0), terms.losses)
    weights = plan.of_rows(plan.tensors.weights, batch)
    return aggregate(losses, tokens.mask, keep=terms.masks.keep | broken, row_weights=weights)


def shaped_advantages(tokens: TokenBatch, plan: BatchPlan) -> Tensor:
    """[S, A], detached, as the surrogate multiplies them: those of the scoring pass, if there was one."""
    found = plan.advantages.get(tokens.micro.trajectory_ids) or estimated_advantages(tokens, plan)
    return plan.objective.regularizers.shaped_advantages(found.advantages, tokens, teacher_mean=plan.teacher_mean)


@torch.no_grad()
def estimated_advantages(tokens: TokenBatch, plan: BatchPlan) -> Advantages:
    """Advantages by the estimator, detached, without the token's own ratio, before whitening; the critic's targets."""
    micro, mask, outputs = tokens.micro, tokens.mask, tokens.outputs
    settings, estimator = plan.objective.advantage, plan.objective.estimator
    rows, rewards = plan.row_advantages.at(micro), plan.objective.regularizers.shaped_rewards(tokens)
    if estimator.of_rows:  # computed for the whole batch already, since siblings may be on other ranks
        return Advantages(rows.of_tokens(micro))
    if estimator.whitens and settings.baseline != "none":
        return Advantages(whiten(broadcast_rows(rows.advantages, mask), mask, moments=rows.moments))
    # Every input that an estimator may name; it picks those that are parameters of its function.
    given = {
        "behavior_logprobs": tokens.behavior, "policy_logprobs": tokens.policy.detach(), "rewards": rewards,
        "mask": mask, "scores": rows.advantages, "baselines": torch.zeros_like(rows.advantages),
        "moments": rows.moments,
    }
    knobs = _knobs(settings, estimator, micro)
    if plan.rho_bar is not None:  # it follows the batch's effective sample size, whatever the setting says
        knobs["rho_bar"] = plan.rho_bar
    if estimator.of_segments:
        given["segment_ids"] = segment_ids(micro, settings.segment, settings.segment_tokens)
    if not estimator.needs_critic:
        return _result(estimator(given, **knobs), mask)
    assert outputs.values is not None, f"advantage.estimator={settings.estimator} needs the critic's values"
    # V predicts centered returns: where a cut trajectory is continued by V, the baseline is in there already.
    charged = rows.baseline.to(rewards.dtype).index_fill(0, micro.bootstrap_rows, 0.0)
    rewards = rewards - place_terminal(charged, mask)
    given |= {
        "rewards": rewards, "values": outputs.values,
        "bootstrap_values": outputs.bootstrap, "q_values": outputs.action_values, "expected_q": outputs.values,
    }
    # The scoring pass calls this with tensors of the host, where a recursion over time is one quick loop: on an
    # accelerator it would be thousands of tiny kernels.
    found = _result(estimator(given, **knobs), mask)
    return replace(found, returns=_returns(settings, given, knobs.get("gamma", 1.0)))


def _returns(settings: AdvantageConfig, given: Mapping[str, Any], gamma: float | Tensor) -> Tensor:
    """Discounted sums of the rewards to the end [S, A]; segments are discounted where they end."""
    mask = given["mask"]
    if "segment_ids" in given:
        gamma = torch.where(turn_ends(given["segment_ids"], mask), settings.gamma, 1.0)
    return n_step(
        given["rewards"], given["values"], mask, bootstrap_values=given["bootstrap_values"], gamma=gamma,
        n=max(1, mask.shape[1]),
    ).targets


def _result(found: Tensor | Returns | SegmentReturns, mask: Tensor) -> Advantages:
    if isinstance(found, Tensor):
        return Advantages(found)
    return Advantages(found.advantages, found.targets, found.starts if isinstance(found, SegmentReturns) else mask)


def segment_ids(micro: MicroBatch, kind: Segment, num_tokens: int) -> Tensor:
    """int64 [S, A], non-decreasing along a row: the turn of each token, or blocks of so many tokens inside a turn."""
    if kind is Segment.turn:
        return micro.turns
    places = torch.arange(micro.mask.shape[1], device=micro.mask.device).expand_as(micro.turns)
    first = torch.zeros_like(micro.turns)
    first[:, 1:] = torch.where(micro.turns[:, 1:] != micro.turns[:, :-1], places[:, 1:], 0)
    inside = places - first.cummax(1).values
    return (inside % num_tokens == 0).long().cumsum(1)


def _knobs(settings: AdvantageConfig, estimator: Estimator, micro: MicroBatch) -> dict[str, Any]:
    knobs = {name: getattr(settings, name) for name in ESTIMATOR_SETTINGS if name in estimator.knobs}
    if "gamma" in knobs:
        knobs["gamma"] = discounts(settings, estimator, micro)
    if "target_rho_bar" in estimator.knobs:  # the function's own None is meant for critics of action values
        knobs["target_rho_bar"] = 1.0
    return {**knobs, **settings.options}


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The tokens of one micro-batch that are trained on; [S, A].

    Attributes:
        keep: bool, action tokens that no mask removed.
        removed: cause -> bool, action tokens that it removed; a token may have several.
        weights: of a correction, detached; None if there is none.
    """

    keep: Tensor
    removed: Mapping[str, Tensor]
    weights: Tensor | None = None


@torch.no_grad()
def token_masks(tokens: TokenBatch, plan: BatchPlan, advantages: Tensor) -> TokenMasks:
    """The tokens that are near enough to the policy to be trained on, and their weights by a correction.

    Args:
        advantages: [S, A]; some masks spare tokens with a positive one.
    """
    loss, correction, lag_policy = plan.objective.loss, plan.objective.correction, plan.lag_policy
    # Against the recorded log-probs, whatever the anchor: masks ask how far the data are, not how far the update went.
    ratios, mask = tokens.log_ratios, tokens.mask
    removed: dict[str, Tensor] = {}
    weights = None
    if lag_policy.mask_beyond is not None:
        # A group that was leased under a wider bound than today's keeps that.
        oldest = plan.of_rows(plan.tensors.head_lags, tokens.micro).clamp(min=lag_policy.mask_beyond)[:, None]
        removed["lag"] = ~lag_keep(tokens.first_lags, mask, max_lag=oldest)
    if any(bound is not None for bound in (loss.veto_low, loss.veto_high, loss.veto_kl)):
        removed["veto"] = _vetoed(loss, ratios, mask)
    nothing = torch.zeros_like(mask)  # of a rule that waits for drift: its metric is 0 meanwhile, not absent
    if loss.opsm_delta is not None:
        on = lag_policy.drift_exceeded or loss.opsm_when is OpsmWhen.always
        delta = loss.opsm_delta * lag_policy.opsm_scale
        removed["opsm"] = ~opsm_keep(ratios, advantages, mask, delta=delta) if on else nothing
    if loss.zscore_bound is not None:
        lag_m2, bound = lag_policy.expected_m2(tokens.lags), loss.zscore_bound
        known = lag_m2 is not None
        removed["zscore"] = ~zscore_keep(ratios, advantages, lag_m2, mask, z_bound=bound) if known else nothing
    # A preset without a weight may still reject; weights of 1 would only cost a multiplication.
    if correction.mode is not None:
        corrected = _corrected(correction, tokens)
        removed["rejected"] = ~corrected.keep
        weights = corrected.weights if correction.weight != "none" else None
    # Causes stay apart, because each has a metric of its own; a token may count in several.
    keep = mask.clone()
    for dropped in removed.values():
        keep &= ~dropped
    return TokenMasks(keep, {cause: dropped & mask for cause, dropped in removed.items()}, weights)


def _vetoed(loss: LossConfig, ratios: Tensor, mask: Tensor) -> Tensor:
    low = 0.0 if loss.veto_low is None else loss.veto_low
    high = float("inf") if loss.veto_high is None else loss.veto_high
    if loss.veto_stat is VetoStat.any:
        kl, suffix = float("inf") if loss.veto_kl is None else loss.veto_kl, loss.veto_scope is VetoScope.suffix
        return ~veto_keep(ratios, mask, low=low, high=high, kl=kl, suffix=suffix)
    # A trajectory without action tokens has mean 0, and nothing to drop.
    count = mask.sum(1).clamp(min=1)
    mean = torch.where(mask, ratios.exp(), 0.0).sum(1) / count
    return ((mean < low) | (mean > high))[:, None].expand_as(mask)


def _corrected(correction: CorrectionSpec, tokens: TokenBatch) -> Correction:
    """The correction on pi/mu, or on pi_prox/mu if it is decoupled."""
    ratios = tokens.log_ratios
    if correction.mode == "decoupled":
        assert tokens.proximal is not None, "a decoupled correction needs the proximal policy's log-probs"
        ratios = log_ratios(tokens.behavior, tokens.proximal, tokens.mask)
    return apply_correction(correction, ratios, tokens.mask)
