"""From settings to a surrogate: which loss settings it reads, and what is refused because it would do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from learner.objective.advantages import CRITIC_FREE, SETTINGS, accepted, own_options
from learner.objective.batch_stats import WEIGHTED_BASELINES
from learner.objective.surrogate import anchor_of
from streamrl.algorithms import CORRECTION_PRESETS, ESTIMATORS, SURROGATES, check_pairing
from streamrl.config.schema import AdvantageConfig, Discount, LossConfig, OpsmWhen, Segment
from streamrl.errors import ConfigError

_CAPPED = ("decoupled_ppo", "tis", "cispo", "aipo", "seq_tis", "topr", "dppo_tv", "dppo_kl")
_WHOLE_RATIO = ("gspo", "gmpo")  # one ratio a trajectory: its tokens must be averaged before trajectories are
_LARGEST_GSPO_CLIP = 0.1
BASELINES = ("leave_one_out", "group_mean", "none", *WEIGHTED_BASELINES)
WHITENS = ("none", "batch")
SCALES = ("none", "std", "batch_std")
AVG_LEVELS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")


def _clip_distances(loss: LossConfig) -> dict[str, float]:
    return {"eps_low": loss.clip_low, "eps_high": loss.clip_high}


_FROM_CLIP: Mapping[str, Callable[[LossConfig], dict[str, Any]]] = {
    "ppo_clip": lambda loss: {**_clip_distances(loss), "dual_clip": loss.dual_clip},
    "decoupled_ppo": lambda loss: {**_clip_distances(loss), "dual_clip": loss.dual_clip},
    "gspo": _clip_distances,
    "dis": lambda loss: {"low": 1.0 - loss.clip_low, "high": 1.0 + loss.clip_high},
    "m2po": lambda loss: {"floor_low": loss.clip_low, "floor_high": loss.clip_high},
    "dppo_tv": lambda loss: {"bound_low": loss.clip_low, "bound_high": loss.clip_high},
    "dppo_kl": lambda loss: {"bound_low": loss.clip_low, "bound_high": loss.clip_high},
}
"""How `clip_low` and `clip_high` are read; the surrogates that are not here have constants of their own."""


def surrogate_options(loss: LossConfig) -> dict[str, Any]:
    """Keyword arguments for `SURROGATES[loss.surrogate]`."""
    options = dict(_FROM_CLIP.get(loss.surrogate, lambda _: {})(loss))
    if loss.cap is not None:
        options["cap"] = loss.cap
    return {**options, **loss.options}


def check_settings(advantage: AdvantageConfig, loss: LossConfig, *, max_lag: int) -> None:
    """Refuse what is unknown, impossible, or without effect.

    Raises:
        ConfigError: names the setting, the value and the remedy.
    """
    _one_of("loss.surrogate", loss.surrogate, tuple(SURROGATES))
    _one_of("advantage.baseline", advantage.baseline, BASELINES)
    _one_of("advantage.scale", advantage.scale, SCALES)
    _one_of("advantage.whiten", advantage.whiten, WHITENS)
    _one_of("loss.avg_level", loss.avg_level, AVG_LEVELS)
    _one_of("loss.correction", loss.correction, tuple(CORRECTION_PRESETS))
    _one_of("advantage.estimator", advantage.estimator, tuple(ESTIMATORS))
    try:
        check_pairing(
            advantage.estimator, loss.surrogate, anchor=anchor_of(loss.surrogate, loss.anchor),
            correction=loss.correction, rho_bar_pg=advantage.rho_bar_pg, max_lag=max_lag,
            allow_uncorrected=loss.allow_uncorrected,
        )
    except ValueError as error:
        raise ConfigError(f"advantage.estimator and loss.surrogate: {error}") from error
    _check_estimator(advantage)
    _check_baseline(advantage)
    _check_correction(loss)
    _check_loss(loss)


def _check_estimator(advantage: AdvantageConfig) -> None:
    """Knobs of this estimator in range, and knobs of others untouched."""
    name = advantage.estimator
    takes = accepted(name) | ({"gamma"} if name == "reinforce_pp" and advantage.baseline == "none" else set())
    for knob, silent in SETTINGS.items():
        value = getattr(advantage, knob)
        if value != silent and knob not in takes:
            raise ConfigError(f"advantage.{knob}={value} does nothing with advantage.estimator={name!r}.")
    unknown = sorted(set(advantage.options) - own_options(name))
    if unknown:
        known = ", ".join(sorted(own_options(name))) or "none"
        raise ConfigError(f"advantage.options holds {unknown}, which {name!r} does not have; it has: {known}.")
    if not 0.0 <= advantage.gamma <= 1.0:
        raise ConfigError(f"advantage.gamma={advantage.gamma} must lie in [0, 1].")
    if not 0.0 <= advantage.lam <= 1.0:
        raise ConfigError(f"advantage.lam={advantage.lam} must lie in [0, 1].")
    if advantage.discount is Discount.turn and (advantage.gamma == 1.0 or name == "vtrace_segments"):
        segments = name == "vtrace_segments"
        why = "segments are discounted once each" if segments else "advantage.gamma=1 discounts nothing"
        raise ConfigError(f"advantage.discount=turn does nothing: {why}.")
    if "rho_bar" in takes:
        _check_bars(advantage)
    if advantage.rho_bar_ess_target is not None:
        if "rho_bar" not in takes or advantage.rho_bar != 1.0:
            raise ConfigError(
                f"advantage.rho_bar_ess_target chooses the rho_bar of V-trace estimators by itself; with "
                f"advantage.estimator={name!r} and advantage.rho_bar={advantage.rho_bar} it cannot."
            )
        if not 0.0 < advantage.rho_bar_ess_target <= 1.0:
            raise ConfigError(f"advantage.rho_bar_ess_target={advantage.rho_bar_ess_target} must lie in (0, 1].")
    if advantage.segment is Segment.block and name != "vtrace_segments":
        raise ConfigError("advantage.segment=block does nothing without advantage.estimator=vtrace_segments.")
    if advantage.segment is not Segment.block and advantage.segment_tokens != AdvantageConfig().segment_tokens:
        raise ConfigError(
            f"advantage.segment_tokens={advantage.segment_tokens} does nothing without advantage.segment=block."
        )
    if advantage.segment_tokens < 1:
        raise ConfigError(f"advantage.segment_tokens={advantage.segment_tokens} must be at least 1.")


def _check_baseline(advantage: AdvantageConfig) -> None:
    name, baseline, scale = advantage.estimator, advantage.baseline, advantage.scale
    if name == "reinforce_pp" and (scale != "none" or advantage.whiten != "none"):
        raise ConfigError(
            "advantage.estimator='reinforce_pp' whitens over the batch itself: set advantage.scale=none and "
            "advantage.whiten=none."
        )
    if scale != "none" and (name not in CRITIC_FREE or baseline in WEIGHTED_BASELINES):
        raise ConfigError(
            f"advantage.scale={scale!r} divides the centered scores of plain groups; with advantage.estimator={name!r} "
            f"and advantage.baseline={baseline!r} use advantage.whiten=batch."
        )
    if baseline not in WEIGHTED_BASELINES:
        for knob in ("weight_cap", "min_ess"):
            value, usual = getattr(advantage, knob), getattr(AdvantageConfig(), knob)
            if value != usual:
                raise ConfigError(f"advantage.{knob}={value} does nothing with advantage.baseline={baseline!r}.")
    if advantage.weight_cap <= 0 or advantage.min_ess < 0:
        raise ConfigError(
            f"advantage.weight_cap={advantage.weight_cap} must be positive and advantage.min_ess={advantage.min_ess} "
            "must not be negative."
        )


def _check_correction(loss: LossConfig) -> None:
    spec = CORRECTION_PRESETS[loss.correction]
    anchor = anchor_of(loss.surrogate, loss.anchor)
    if spec.surrogate is not None and spec.surrogate != loss.surrogate:
        raise ConfigError(
            f"loss.correction={loss.correction!r} belongs to loss.surrogate={spec.surrogate!r}, not {loss.surrogate!r}."
        )
    if spec.mode == "decoupled" and anchor not in ("recomputed", "loglinear", "ewma"):
        raise ConfigError(
            f"loss.correction={loss.correction!r} weighs pi_prox/mu and needs a proximal policy: set loss.anchor to "
            "recomputed, loglinear or ewma."
        )
    if loss.anchor is not None and loss.surrogate not in ("ppo_clip", "decoupled_ppo"):
        raise ConfigError(f"loss.anchor={loss.anchor!r} does nothing with loss.surrogate={loss.surrogate!r}.")
    if loss.surrogate == "decoupled_ppo" and anchor == "behavior":
        raise ConfigError(
            "loss.surrogate=decoupled_ppo needs a proximal policy beside the behavior policy: set loss.anchor to "
            "recomputed, loglinear or ewma (or loss.surrogate=ppo_clip, whose anchor is the behavior policy)."
        )
    _check_idle(loss, anchor)
    if not 0.0 <= loss.ewma_decay < 1.0:
        raise ConfigError(f"loss.ewma_decay={loss.ewma_decay} must lie in [0, 1).")
    if loss.opsm_delta is not None and loss.opsm_delta < 0:
        raise ConfigError(f"loss.opsm_delta={loss.opsm_delta} must not be negative.")
    if loss.opsm_when is OpsmWhen.over_budget and loss.opsm_delta is None:
        raise ConfigError("loss.opsm_when=over_budget does nothing without loss.opsm_delta.")
    if loss.zscore_bound is not None and loss.zscore_bound <= 0:
        raise ConfigError(f"loss.zscore_bound={loss.zscore_bound} must be positive.")


def _check_idle(loss: LossConfig, anchor: str) -> None:
    """Constants of a part that is switched off."""
    usual = LossConfig()
    if loss.ewma_decay != usual.ewma_decay and anchor != "ewma":
        raise ConfigError(f"loss.ewma_decay={loss.ewma_decay} does nothing without loss.anchor=ewma.")
    if loss.veto_stat is not usual.veto_stat and loss.veto_low is None and loss.veto_high is None:
        raise ConfigError(f"loss.veto_stat={loss.veto_stat.name} does nothing without loss.veto_low or loss.veto_high.")


def _check_bars(advantage: AdvantageConfig) -> None:
    if not 0.0 < advantage.c_bar <= advantage.rho_bar:
        raise ConfigError(
            f"advantage.c_bar={advantage.c_bar} must lie between 0 and advantage.rho_bar={advantage.rho_bar}."
        )


def _check_loss(loss: LossConfig) -> None:
    name = loss.surrogate
    if loss.cap is not None and name not in _CAPPED:
        raise ConfigError(f"loss.cap={loss.cap} does nothing with loss.surrogate={name!r}; only {', '.join(_CAPPED)}.")
    known = {p.name for p in inspect.signature(SURROGATES[name]).parameters.values() if p.kind is p.KEYWORD_ONLY}
    unknown = sorted(set(loss.options) - (known - {"weights", "bounds"}) | set(loss.options) & set(_given(loss)))
    if unknown:
        free = ", ".join(sorted(known - {"weights", "bounds"} - set(_given(loss)))) or "none"
        raise ConfigError(f"loss.options holds {unknown}; loss.surrogate={name!r} takes there: {free}.")
    if loss.cap is not None and loss.cap <= 0:
        raise ConfigError(f"loss.cap={loss.cap} must be positive.")
    if not 0.0 <= loss.clip_low < 1.0 or loss.clip_high < 0.0:
        raise ConfigError(f"loss.clip_low={loss.clip_low} must lie in [0, 1), loss.clip_high={loss.clip_high} above 0.")
    if name in _WHOLE_RATIO and loss.avg_level != "seq-mean-token-mean":
        raise ConfigError(f"loss.surrogate={name!r} is defined for loss.avg_level='seq-mean-token-mean' only.")
    if name == "gspo" and max(loss.clip_low, loss.clip_high) > _LARGEST_GSPO_CLIP:
        raise ConfigError(
            f"loss.surrogate='gspo' clips the mean ratio of a trajectory, which stays within about 0.001 of 1; with "
            f"loss.clip_high={loss.clip_high} it would never clip: set about loss.clip_low=3e-4 loss.clip_high=4e-4."
        )
    low, high = loss.veto_low or 0.0, loss.veto_high or float("inf")
    if not 0.0 <= low < 1.0 < high:
        raise ConfigError(f"loss.veto_low={loss.veto_low} and loss.veto_high={loss.veto_high} must lie around 1.")
    if loss.behavior_penalty < 0:
        raise ConfigError(f"loss.behavior_penalty={loss.behavior_penalty} must not be negative.")


def _given(loss: LossConfig) -> set[str]:
    """Arguments of the surrogate that settings of their own decide."""
    return set(_FROM_CLIP.get(loss.surrogate, lambda _: {})(loss)) | {"cap"}


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{key}={value!r} is unknown: choose one of {', '.join(known)}.")
