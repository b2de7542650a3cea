"""Masks: tokens that are too far off-policy to train on, by cause, and the weights of corrections.

    lag       tokens older than the bound                               staleness.mode=mask_old_tokens
    veto      trajectories with one impossible ratio, or what follows   loss.veto_low, loss.veto_high, loss.veto_kl
    opsm      harmful tokens of trajectories that drifted away          loss.opsm_delta
    zscore    harmful tokens far outside what their lag explains        loss.zscore_bound
    rejected  trajectories that the correction preset turns away        loss.correction

A masked token leaves the sum but not the denominator of the loss: what is left is never inflated. Masks combine freely;
weights do not (`check_pairing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.objective.lag_policy import LagPolicy
from learner.objective.token_batch import TokenBatch
from streamrl.algorithms import apply_correction, lag_keep, log_ratios, opsm_keep, veto_keep, zscore_keep
from streamrl.algorithms.types import Correction, CorrectionSpec
from streamrl.config.schema import LossConfig, OpsmWhen, VetoScope, VetoStat


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
def token_masks(
    loss: LossConfig, correction: CorrectionSpec, lag_policy: LagPolicy, tokens: TokenBatch, advantages: Tensor,
    head_lags: Tensor,
) -> TokenMasks:
    """Mask the tokens that are too far off-policy to train on.

    Args:
        correction: the entry that `loss` names.
        advantages: [S, A]; some masks spare tokens with a positive one.
        head_lags: int64 [S], the largest lag that the hub promised to train of each trajectory, at the batch's first
            optimizer step.
    """
    # Against the recorded log-probs, whatever the anchor: masks ask how far the data are, not how far the update went.
    ratios, mask = tokens.log_ratios, tokens.mask
    removed: dict[str, Tensor] = {}
    weights = None
    if lag_policy.mask_beyond is not None:
        # A group that was leased under a wider bound than today's keeps that.
        oldest = head_lags.clamp(min=lag_policy.mask_beyond)[:, None]
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
