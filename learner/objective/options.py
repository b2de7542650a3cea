"""Settings of advantages and loss: the functions they name, those functions' knobs, and what is refused.

A setting that is unknown, impossible or without effect is an error before anything is generated. Tables and entries say
what a function reads (`streamrl.algorithms.surrogates.registry`); nothing here lists names of algorithms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from streamrl.algorithms import Estimator, Surrogate, check_pairing, find_correction, find_estimator, find_surrogate
from streamrl.algorithms.surrogates.aggregation import MODES as AVG_LEVELS
from streamrl.config.ranges import out_of_range
from streamrl.config.schema import AdvantageConfig, Discount, LossConfig, OpsmWhen, Segment
from streamrl.errors import ConfigError

WEIGHTED_BASELINES = ("weighted_leave_one_out", "opob")
"""Baselines that need the current policy's ratios, hence a scoring pass."""
BASELINES = ("leave_one_out", "group_mean", "none", *WEIGHTED_BASELINES)
WHITENS = ("none", "batch")
SCALES = ("none", "std", "batch_std")
ESTIMATOR_SETTINGS: Mapping[str, float | None] = {
    "gamma": 1.0, "lam": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "rho_bar_pg": None,
}
"""Settings that are an estimator's knob of the same name, and the value at which they do nothing."""


def surrogate_options(loss: LossConfig) -> dict[str, Any]:
    """Knobs of the surrogate that `loss` names."""
    return {**_set_knobs(find_surrogate(loss.surrogate), loss), **loss.options}


def _set_knobs(surrogate: Surrogate, loss: LossConfig) -> dict[str, Any]:
    return surrogate.set_knobs(
        clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip, cap=loss.cap
    )


def anchor_of(loss: LossConfig) -> str:
    """Name of the anchor: the chosen one, or the surrogate's usual one."""
    return find_surrogate(loss.surrogate).usual_anchor if loss.anchor is None else loss.anchor


def brings_no_ratio(loss: LossConfig) -> bool:
    """Nothing multiplies the advantages by pi/mu: a KL among them must bring its own."""
    return not find_surrogate(loss.surrogate).applies_ratio and find_correction(loss.correction).weight == "none"


def check_settings(advantage: AdvantageConfig, loss: LossConfig, *, max_lag: int) -> None:
    """Refuse what is unknown, impossible, or without effect.

    Raises:
        ConfigError: names the setting, the value and the remedy.
    """
    for message in (*out_of_range(advantage, "advantage."), *out_of_range(loss, "loss.")):
        raise ConfigError(message)
    estimator, surrogate = find_estimator(advantage.estimator), find_surrogate(loss.surrogate)
    find_correction(loss.correction)
    one_of("advantage.baseline", advantage.baseline, BASELINES)
    one_of("advantage.scale", advantage.scale, SCALES)
    one_of("advantage.whiten", advantage.whiten, WHITENS)
    one_of("loss.avg_level", loss.avg_level, AVG_LEVELS)
    try:
        check_pairing(
            advantage.estimator, loss.surrogate, anchor=anchor_of(loss), correction=loss.correction,
            rho_bar_pg=advantage.rho_bar_pg, max_lag=max_lag, allow_uncorrected=loss.allow_uncorrected,
        )
    except ValueError as error:
        raise ConfigError(f"advantage.estimator and loss.surrogate: {error}") from error
    _check_estimator(advantage, estimator)
    _check_baseline(advantage, estimator)
    _check_correction(loss, surrogate)
    _check_masks(loss)
    _check_surrogate(loss, surrogate)


def _check_estimator(advantage: AdvantageConfig, estimator: Estimator) -> None:
    """Knobs of this estimator in range, and knobs of others untouched."""
    name, with_it = advantage.estimator, f"with advantage.estimator={advantage.estimator!r}"
    for knob, idle in ESTIMATOR_SETTINGS.items():
        if knob not in estimator.knobs:
            unused(f"advantage.{knob}", getattr(advantage, knob), idle, with_it)
    own = estimator.knobs - ESTIMATOR_SETTINGS.keys() - {"baseline", "scale"}
    unknown = sorted(set(advantage.options) - own)
    known = ", ".join(sorted(own)) or "none"
    need(not unknown, f"advantage.options holds {unknown}, which {name!r} does not have; it has: {known}.")
    if advantage.discount is Discount.turn:
        segments, idle = estimator.of_segments, "advantage.gamma=1 discounts nothing"
        why = "segments are discounted once each" if segments else idle
        need(not segments and advantage.gamma != 1.0, f"advantage.discount=turn does nothing: {why}.")
    need(
        "rho_bar" not in estimator.knobs or advantage.c_bar <= advantage.rho_bar,
        f"advantage.c_bar={advantage.c_bar} must lie between 0 and advantage.rho_bar={advantage.rho_bar}.",
    )
    need(
        advantage.rho_bar_ess_target is None or ("rho_bar" in estimator.knobs and advantage.rho_bar == 1.0),
        f"advantage.rho_bar_ess_target chooses the rho_bar of V-trace estimators by itself; {with_it} and "
        f"advantage.rho_bar={advantage.rho_bar} it cannot.",
    )
    need(
        advantage.segment is not Segment.block or estimator.of_segments,
        f"advantage.segment=block does nothing without an estimator of segments, as vtrace_segments; got {name!r}.",
    )
    if advantage.segment is not Segment.block:
        unused(
            "advantage.segment_tokens", advantage.segment_tokens, AdvantageConfig().segment_tokens,
            "without advantage.segment=block",
        )


def _check_baseline(advantage: AdvantageConfig, estimator: Estimator) -> None:
    name, baseline, scale = advantage.estimator, advantage.baseline, advantage.scale
    weighted, usual = baseline in WEIGHTED_BASELINES, AdvantageConfig()
    if estimator.of_rows:
        for knob in {"baseline", "scale"} - estimator.knobs:
            unused(
                f"advantage.{knob}", getattr(advantage, knob), getattr(usual, knob),
                f"with advantage.estimator={name!r}, which has no such argument",
            )
    need(
        not estimator.whitens or (scale == "none" and advantage.whiten == "none"),
        f"advantage.estimator={name!r} whitens over the batch itself: set advantage.scale=none and "
        "advantage.whiten=none.",
    )
    need(
        scale == "none" or not (estimator.needs_critic or weighted),
        f"advantage.scale={scale!r} divides the centered scores of plain groups; with advantage.estimator={name!r} "
        f"and advantage.baseline={baseline!r} use advantage.whiten=batch.",
    )
    if not weighted:
        for knob in ("weight_cap", "min_ess"):
            unused(
                f"advantage.{knob}", getattr(advantage, knob), getattr(usual, knob),
                f"with advantage.baseline={baseline!r}",
            )


def _check_correction(loss: LossConfig, surrogate: Surrogate) -> None:
    spec, anchor, name = find_correction(loss.correction), anchor_of(loss), loss.surrogate
    proximal = "a proximal policy: set loss.anchor to recomputed, loglinear or ewma"
    need(
        spec.surrogate in (None, name),
        f"loss.correction={loss.correction!r} belongs to loss.surrogate={spec.surrogate!r}, not {name!r}.",
    )
    need(
        spec.mode != "decoupled" or anchor not in ("behavior", "none"),
        f"loss.correction={loss.correction!r} weighs pi_prox/mu and needs {proximal}.",
    )
    if not surrogate.takes_anchor:
        unused("loss.anchor", loss.anchor, None, f"with loss.surrogate={name!r}")
    need(
        not surrogate.needs_proximal or anchor != "behavior",
        f"loss.surrogate={name} needs {proximal} (or take a surrogate on the behavior policy, as ppo_clip).",
    )
    if anchor != "ewma":
        unused("loss.ewma_decay", loss.ewma_decay, LossConfig().ewma_decay, "without loss.anchor=ewma")


def _check_masks(loss: LossConfig) -> None:
    if loss.veto_low is None and loss.veto_high is None:
        unused("loss.veto_stat", loss.veto_stat, LossConfig().veto_stat, "without loss.veto_low or loss.veto_high")
    low, high = loss.veto_low or 0.0, loss.veto_high or float("inf")
    need(
        0.0 <= low < 1.0 < high,
        f"loss.veto_low={loss.veto_low} and loss.veto_high={loss.veto_high} must lie around 1.",
    )
    if loss.opsm_delta is None:
        unused("loss.opsm_when", loss.opsm_when, OpsmWhen.always, "without loss.opsm_delta")


def _check_surrogate(loss: LossConfig, surrogate: Surrogate) -> None:
    name, own = loss.surrogate, surrogate.knobs - {"cap"} - _set_knobs(surrogate, loss).keys()
    need(
        loss.cap is None or "cap" in surrogate.knobs,
        f"loss.cap={loss.cap} does nothing with loss.surrogate={name!r}, which truncates no weight.",
    )
    unknown = sorted(set(loss.options) - own)
    free = ", ".join(sorted(own)) or "none"
    need(not unknown, f"loss.options holds {unknown}; loss.surrogate={name!r} takes there: {free}.")
    need(
        not surrogate.whole_row or loss.avg_level == "seq-mean-token-mean",
        f"loss.surrogate={name!r} is defined for loss.avg_level='seq-mean-token-mean' only.",
    )
    need(
        surrogate.max_clip is None or max(loss.clip_low, loss.clip_high) <= surrogate.max_clip,
        f"loss.surrogate={name!r} clips the mean ratio of a trajectory, which stays within about 0.001 of 1; with "
        f"loss.clip_high={loss.clip_high} it would never clip: set about loss.clip_low=3e-4 loss.clip_high=4e-4.",
    )


def unused(key: str, value: Any, idle: Any, why: str) -> None:
    """Refuse a value other than the idle one, because it does nothing; `why` says where."""
    shown = getattr(value, "name", value)
    need(value == idle, f"{key}={shown} does nothing {why}.")


def one_of(key: str, value: str, known: Collection[str]) -> None:
    """Refuse a name that is not in the list."""
    need(value in known, f"{key}={value!r} is unknown: choose one of {', '.join(known)}.")


def need(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`."""
    if not condition:
        raise ConfigError(message)
