"""The loss of one micro-batch, from its tokens down to one number.

    advantages   by the estimator, or from the scoring pass           `advantages`
    masks        tokens too far off-policy, weights of corrections    `masks`
    surrogate    the policy term, by name                             `streamrl.algorithms`
    regularizers KL, entropy, behavior penalty, constraints           `regularizers`

Legend: S trajectories of a micro-batch, A most action tokens of one, M action tokens of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.objective.advantages import Advantages, token_advantages
from learner.objective.masks import TokenMasks, token_masks
from learner.objective.plan import BatchPlan
from learner.objective.token_batch import TokenBatch
from streamrl.algorithms import aggregate


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


def token_loss(tokens: TokenBatch, plan: BatchPlan) -> LossTerms:
    """Losses of tokens; every stage reads the tokens and what the stages above it gave."""
    terms = policy_term(tokens, plan)
    # A correction weighs the policy term alone; regularizers come after, with weights of their own.
    return replace(terms, losses=plan.objective.regularizers.regularized(terms.losses, tokens))


def policy_term(tokens: TokenBatch, plan: BatchPlan) -> LossTerms:
    """The losses before any regularizer: a function of the policy's log-probs alone."""
    objective = plan.objective
    assert plan.bounds is not None or objective.surrogate.fit is None, "run score_batch() before the first loss"
    advantages = shaped_advantages(tokens, plan)
    masks = trusted_tokens(tokens, plan, advantages)
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
    terms = token_loss(tokens, plan)
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


def estimated_advantages(tokens: TokenBatch, plan: BatchPlan) -> Advantages:
    """Advantages by the estimator, without the token's own ratio, and the critic's targets."""
    objective = plan.objective
    rewards = objective.regularizers.shaped_rewards(tokens)
    return token_advantages(
        objective.advantage, objective.estimator, tokens, plan.row_advantages.of(tokens.micro), rewards,
        rho_bar=plan.rho_bar,
    )


def trusted_tokens(tokens: TokenBatch, plan: BatchPlan, advantages: Tensor) -> TokenMasks:
    """The tokens that are trained on, and their weights by a correction."""
    head_lags = plan.of_rows(plan.tensors.head_lags, tokens.micro)
    return token_masks(plan.objective.loss, plan.objective.correction, plan.lag_policy, tokens, advantages, head_lags)
