"""Guards: tokens and trajectories that are too far off-policy to be trusted, by cause, and the weights of corrections.

Every guard is a mask on tokens that stays out of the denominator of the loss: what is left is never inflated. Masks
combine freely; weights do not (`check_pairing` sees to it).

    lag       tokens older than the bound                               staleness.mode=mask_old_tokens
    veto      trajectories with one impossible ratio                    loss.veto_low, loss.veto_high
    opsm      harmful tokens of trajectories that drifted away          loss.opsm_delta
    zscore    harmful tokens far outside what their lag explains        loss.zscore_bound
    rejected  trajectories that the correction preset turns away        loss.correction
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms import CORRECTION_PRESETS, apply_correction, lag_keep, opsm_keep, veto_keep, zscore_keep
from streamrl.config.schema import LossConfig, OpsmWhen, VetoStat

CAUSES = ("lag", "veto", "opsm", "zscore", "rejected")


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The verdict over one micro-batch; [S, A].

    Attributes:
        keep: bool, action tokens that no guard removed.
        removed: cause -> bool, action tokens that it removed; a token may have several.
        weights: of a correction, detached; None if there is none.
    """

    keep: Tensor
    removed: Mapping[str, Tensor]
    weights: Tensor | None = None


@torch.no_grad()
def guard(
    loss: LossConfig, log_ratios: Tensor, advantages: Tensor, lags: Tensor, mask: Tensor, *,
    oldest: int | Tensor | None = None, proximal_ratios: Tensor | None = None, drift_exceeded: bool = True,
    lag_m2: Tensor | None = None,
) -> TokenMasks:
    """Which tokens to trust.

    Args:
        log_ratios: [S, A] log pi - log mu, clamped.
        oldest: largest lag of a trainable token, or [S, 1] of each trajectory's; None trusts every age.
        proximal_ratios: [S, A] log pi_prox - log mu, for decoupled corrections.
        drift_exceeded: drift exceeds its target in this step, for `loss.opsm_when=over_budget`.
        lag_m2: [S, A] mean squared log-ratio expected at each token's lag, for `loss.zscore_bound`.
    """
    removed: dict[str, Tensor] = {}
    weights = None
    if oldest is not None:
        removed["lag"] = ~lag_keep(lags, mask, max_lag=oldest)
    if loss.veto_low is not None or loss.veto_high is not None:
        low = 0.0 if loss.veto_low is None else loss.veto_low
        high = float("inf") if loss.veto_high is None else loss.veto_high
        if loss.veto_stat is VetoStat.mean:
            count = mask.sum(1).clamp(min=1)
            mean = torch.where(mask, log_ratios.exp(), 0.0).sum(1) / count
            removed["veto"] = ((mean < low) | (mean > high))[:, None].expand_as(mask)
        else:
            removed["veto"] = ~veto_keep(log_ratios, mask, low=low, high=high)
    if loss.opsm_delta is not None and (drift_exceeded or loss.opsm_when is OpsmWhen.always):
        removed["opsm"] = ~opsm_keep(log_ratios, advantages, mask, delta=loss.opsm_delta)
    if loss.zscore_bound is not None and lag_m2 is not None:
        removed["zscore"] = ~zscore_keep(log_ratios, advantages, lag_m2, mask, z_bound=loss.zscore_bound)
    spec = CORRECTION_PRESETS[loss.correction]
    if spec.mode is not None:
        ratios = proximal_ratios if spec.mode == "decoupled" else log_ratios
        assert ratios is not None, f"{loss.correction} needs the proximal policy's ratios"
        corrected = apply_correction(spec, ratios, mask)
        removed["rejected"] = ~corrected.keep
        weights = corrected.weights if spec.weight != "none" else None
    keep = mask.clone()
    for tokens in removed.values():
        keep &= ~tokens
    return TokenMasks(keep, {cause: tokens & mask for cause, tokens in removed.items()}, weights)
