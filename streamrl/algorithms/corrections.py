"""Corrections for the gap between the policy that sampled and the policy that learns.

All take `log_ratios` [B, T]: `pi_prox/mu` in decoupled mode, `pi/mu` in bypass mode, never a ratio against the
reference. Weights and masks are detached; differentiating a weight would add another objective. A weight multiplies
the token loss, a mask goes to `aggregate(keep=...)`, where its tokens stay in the denominator. Zeroing is not
clamping: a clamped weight still pushes, a zeroed one does not. S, g, K2, K3 are the row statistics of `SequenceStats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_rows, described, fits, name_of, only, read, read_log_ratios, require
from streamrl.algorithms.ratios import row_log_ratios, sequence_stats
from streamrl.algorithms.types import Correction, CorrectionSpec
from streamrl.errors import ConfigError

__all__ = [
    "CORRECTION_PRESETS", "apply_correction", "geo_keep", "k3_keep", "normalize_weights", "opsm_keep", "seq_mis_keep",
    "seq_tis_weights", "tis_weights", "veto_keep",
]


@torch.no_grad()
def tis_weights(log_ratios: Tensor, mask: Tensor, *, cap: float = 2.0, floor: float = 0.0) -> Tensor:
    """Truncated token ratio `min(max(rho, floor), cap)`, [B, T]."""
    require(0.0 <= floor <= cap and cap > 0.0, f"floor={floor} and cap={cap} must satisfy 0 <= floor <= cap, cap > 0")
    return only(mask, read_log_ratios(mask, log_ratios).exp().clamp(floor, cap))


@torch.no_grad()
def seq_tis_weights(log_ratios: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated trajectory ratio `min(exp(S), cap)` on every action token, [B, T]; S clamped to +-20."""
    require(cap > 0.0, f"cap={cap} must be positive")
    return only(mask, row_log_ratios(log_ratios, mask).exp().clamp(max=cap)[:, None].expand(mask.shape))


@torch.no_grad()
def seq_mis_keep(log_ratios: Tensor, mask: Tensor, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """Keep rows with `low <= exp(S) <= high`; bool [B, T]."""
    require_range(low, high)
    ratio = row_log_ratios(log_ratios, mask).exp()
    return mask & ((ratio >= low) & (ratio <= high))[:, None]


@torch.no_grad()
def geo_keep(log_ratios: Tensor, mask: Tensor, *, low: float | Tensor = 0.999, high: float | Tensor = 1.001) -> Tensor:
    """Keep rows whose geometric mean ratio is inside: `low <= exp(g) <= high`, bounds float or [B]; bool [B, T].

    The defaults fit engine mismatch only: of lagged rows g has mean -KL and a spread of about `sqrt(2 KL / n)`.
    """
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, Tensor) and bound.dim() > 0:
            check_rows(mask, **{name: bound})
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        require_range(low, high)
    ratio = sequence_stats(log_ratios, mask).log_mean.exp()
    return mask & ((ratio >= low) & (ratio <= high))[:, None]


@torch.no_grad()
def k3_keep(log_ratios: Tensor, mask: Tensor, *, bound: float = 0.01) -> Tensor:
    """Keep rows with `K3 = mean(exp(ell) - ell - 1) <= bound`; bool [B, T]."""
    require(bound >= 0.0, f"bound={bound} must not be negative")
    return mask & (sequence_stats(log_ratios, mask).k3_mean <= bound)[:, None]


@torch.no_grad()
def veto_keep(
    log_ratios: Tensor,
    mask: Tensor,
    *,
    low: float = 1e-4,
    high: float = 100.0,
    kl: float = math.inf,
    suffix: bool = False,
) -> Tensor:
    """Drop the row if any token ratio is below `low` or above `high`, or its `k3 = rho - 1 - ell` above `kl`; [B, T].

    Args:
        kl: bound on the largest k3 of the row, a sample's estimate of its token's KL (after arXiv:2512.23075).
        suffix: drop only the first such token and what comes after it, whose states it led to (after arXiv:2605.17570).
    """
    require_range(low, high)
    log_ratios = read_log_ratios(mask, log_ratios)
    ratio, k3 = log_ratios.exp(), torch.expm1(log_ratios) - log_ratios
    broken = mask & ~((ratio >= low) & (ratio <= high) & (k3 <= kl))
    return mask & ~(broken.cumsum(1) > 0 if suffix else broken.any(1, keepdim=True))


@torch.no_grad()
def opsm_keep(log_ratios: Tensor, advantages: Tensor, mask: Tensor, *, delta: float = 0.5) -> Tensor:
    """Off-policy sequence masking: drop tokens with A < 0 in rows with `mean(log mu - log pi) = -g > delta`.

    Stale negatives are the tokens that make runs collapse; stale positives are tolerated. bool [B, T].
    Source: DeepSeek-V3.2, arXiv:2512.02556.
    """
    (advantages,) = read(mask, advantages=advantages)
    stale = -sequence_stats(log_ratios, mask).log_mean > delta
    return mask & ~((advantages < 0) & stale[:, None])


@torch.no_grad()
def normalize_weights(
    weights: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mean: float | Tensor | None = None,
) -> Tensor:
    """`weights / mean`, [B, T]: the mean over action tokens ("token") or over rows of each row's mean ("sequence").

    Use after truncation. Pass the `mean` of the whole optimizer batch when this is a part of it. A mean of 0 gives 0.
    """
    require(level in ("token", "sequence"), f"level={level!r} must be one of token, sequence")
    (values,) = read(mask, weights=weights)
    if mean is None:
        counts = mask.sum(1)
        if level == "token":
            mean = values.sum() / counts.sum().clamp(min=1)
        else:
            mean = (values.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
    divisor = torch.as_tensor(mean, dtype=values.dtype, device=values.device)
    return only(mask & (divisor != 0), values / torch.where(divisor != 0, divisor, torch.ones_like(divisor)))


@torch.no_grad()
def apply_correction(spec: CorrectionSpec, log_ratios: Tensor, mask: Tensor) -> Correction:
    """The weights (1 if the spec has none) and the mask of one `CorrectionSpec`; see `CORRECTION_PRESETS`."""
    levels = ("none", "token", "sequence")
    require(spec.weight in levels, f"weight={spec.weight!r} must be one of {', '.join(levels)}")
    if spec.function is not None:
        return _checked(spec.function(log_ratios, mask), log_ratios.shape, spec.function)
    if spec.weight == "token":
        weights = tis_weights(log_ratios, mask, cap=spec.cap)
    elif spec.weight == "sequence":
        weights = seq_tis_weights(log_ratios, mask, cap=spec.cap)
    else:
        weights = only(mask, torch.ones_like(read_log_ratios(mask, log_ratios)))
    if spec.normalize and spec.weight != "none":
        weights = normalize_weights(weights, mask, level=spec.weight)
    return Correction(weights=weights, keep=_rejection(spec, log_ratios, mask))


def _checked(found: Any, shape: Sequence[int], function: Callable[..., Any]) -> Correction:
    """The result of a user's correction. Raises ConfigError."""
    wrong = "" if isinstance(found, Correction) else described(found)
    if not wrong and not fits(found.weights, shape):
        wrong = f"`weights` that is {described(found.weights)}"
    if not wrong and not fits(found.keep, shape, is_bool=True):
        wrong = f"`keep` that is {described(found.keep)}"
    if wrong:
        raise ConfigError(
            f"loss.correction={name_of(function)} returned {wrong}; return Correction(weights=[B, T], "
            f"keep=bool [B, T]) (here {list(shape)})."
        )
    return found


def _rejection(spec: CorrectionSpec, log_ratios: Tensor, mask: Tensor) -> Tensor:
    if spec.reject == "none":
        return mask.clone()
    if spec.reject == "sequence":
        return seq_mis_keep(log_ratios, mask, low=spec.low, high=spec.high)
    if spec.reject == "geometric":
        return geo_keep(log_ratios, mask, low=spec.low, high=spec.high)
    require(spec.reject == "k3", f"reject={spec.reject!r} must be one of none, sequence, geometric, k3")
    return k3_keep(log_ratios, mask, bound=spec.high)


def require_range(low: float, high: float) -> None:
    """Refuse bounds of a ratio that are negative or in the wrong order."""
    require(0.0 <= low <= high, f"low={low} and high={high} must satisfy 0 <= low <= high")


_GEO = {"reject": "geometric", "low": 0.999, "high": 1.001}
_K3 = {"reject": "k3", "high": 0.01}
_DECOUPLED = {"mode": "decoupled"}
_PPO = {"mode": "bypass", "surrogate": "ppo_clip"}
_PG = {"mode": "bypass", "surrogate": "reinforce"}
_TOKEN = {"weight": "token", "cap": 2.0}
_SEQUENCE = {"weight": "sequence", "cap": 2.0}

# Names as in verl, so that users find them. The bypass_ppo_clip rows carry no weight: the PPO ratio is the weight.
CORRECTION_PRESETS: Mapping[str, CorrectionSpec] = MappingProxyType(
    {
        "disabled": CorrectionSpec(),
        "decoupled_token_is": CorrectionSpec(**_DECOUPLED, **_TOKEN),
        "decoupled_seq_is": CorrectionSpec(**_DECOUPLED, **_SEQUENCE),
        "decoupled_seq_is_rs": CorrectionSpec(**_DECOUPLED, **_SEQUENCE, reject="sequence", low=0.5, high=2.0),
        "decoupled_geo_rs": CorrectionSpec(**_DECOUPLED, **_GEO),
        "decoupled_geo_rs_token_tis": CorrectionSpec(**_DECOUPLED, **_TOKEN, **_GEO),
        "decoupled_geo_rs_seq_tis": CorrectionSpec(**_DECOUPLED, **_SEQUENCE, **_GEO),
        "decoupled_k3_rs": CorrectionSpec(**_DECOUPLED, **_K3),
        "decoupled_k3_rs_token_tis": CorrectionSpec(**_DECOUPLED, **_TOKEN, **_K3),
        "decoupled_k3_rs_seq_tis": CorrectionSpec(**_DECOUPLED, **_SEQUENCE, **_K3),
        "bypass_ppo_clip": CorrectionSpec(**_PPO),
        "bypass_ppo_clip_geo_rs": CorrectionSpec(**_PPO, **_GEO),
        "bypass_ppo_clip_k3_rs": CorrectionSpec(**_PPO, **_K3),
        "bypass_pg_is": CorrectionSpec(**_PG, **_SEQUENCE),
        "bypass_pg_geo_rs": CorrectionSpec(**_PG, **_GEO),
        "bypass_pg_geo_rs_token_tis": CorrectionSpec(**_PG, **_TOKEN, **_GEO),
        "bypass_pg_geo_rs_seq_tis": CorrectionSpec(**_PG, **_SEQUENCE, **_GEO),
    }
)
