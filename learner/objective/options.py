"""Settings of advantages and loss: the functions they name, those functions' knobs, and what is refused.

A setting that is unknown, impossible or without effect is an error before anything is generated. Tables and entries say
what a function reads (`streamrl.algorithms.registry`); nothing here lists names of algorithms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

import torch

from streamrl.algorithms import Estimator, Surrogate, check_pairing, find_correction, find_estimator, find_surrogate
from streamrl.algorithms.aggregation import MODES as AVG_LEVELS
from streamrl.algorithms.registry import Entry
from streamrl.config.schema import AdvantageBy, AdvantageConfig, LossConfig, Segment, VetoStat
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean

WEIGHTED_BASELINES = ("weighted_leave_one_out", "opob")
"""Baselines that need the current policy's ratios, hence a scoring pass."""
BASELINES = ("leave_one_out", "group_mean", "batch", "none", *WEIGHTED_BASELINES)
AGENT_BASELINES = ("leave_one_out", "group_mean", "none")
"""Baselines that `advantage.by=agent` takes."""
WHITENS = ("none", "batch")
SCALES = ("none", "std", "batch_std")
_SAFE_ETA = 4
"""The largest lead at which no arm of docs/staleness.md differed from another."""
ESTIMATOR_SETTINGS = ("gamma", "lam", "rho_bar", "c_bar", "rho_bar_pg")
"""Settings that are an estimator's knob of the same name."""


def surrogate_options(loss: LossConfig) -> dict[str, Any]:
    """Knobs of the surrogate that `loss` names."""
    knobs = find_surrogate(loss.surrogate).set_knobs(
        clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip, cap=loss.cap
    )
    return {**knobs, **loss.options}


def anchor_of(loss: LossConfig) -> str:
    """Name of the anchor: the chosen one, or the surrogate's usual one."""
    return find_surrogate(loss.surrogate).usual_anchor if loss.anchor is None else loss.anchor


def brings_no_ratio(loss: LossConfig) -> bool:
    """Nothing multiplies the advantages by pi/mu: a KL among them must bring its own."""
    return not find_surrogate(loss.surrogate).applies_ratio and find_correction(loss.correction).weight == "none"


def vanishes_at_zero(surrogate: Surrogate, options: Mapping[str, Any]) -> bool:
    """Whether a token without advantage has no loss and no gradient, whatever its ratio: found out by trying.

    False for a surrogate whose bounds follow the batch: it must see every token.
    """
    if surrogate.fit is not None:
        return False
    log_ratios = torch.tensor([[-20.0, -3.0, -0.4, -0.05, 0.0, 0.05, 0.4, 3.0, 20.0]])
    behavior = torch.full_like(log_ratios, -1.5)
    policy = (behavior + log_ratios).requires_grad_()
    proximal = behavior + 0.5 * log_ratios
    found = surrogate({
        "policy_logprobs": policy, "behavior_logprobs": behavior, "proximal_logprobs": proximal,
        "anchor_logprobs": proximal, "advantages": torch.zeros_like(behavior), "bounds": None,
        "mask": torch.ones_like(behavior, dtype=torch.bool), "lags": torch.arange(log_ratios.numel())[None],
    }, **options).losses
    (slopes,) = torch.autograd.grad(found.sum(), policy, allow_unused=True) if found.requires_grad else (None,)
    return not bool(found.any()) and (slopes is None or not bool(slopes.any()))


def check_settings(advantage: AdvantageConfig, loss: LossConfig, *, max_lag: int, steps_per_batch: int = 1) -> None:
    """Refuse what is unknown, impossible, or without effect.

    Args:
        steps_per_batch: optimizer steps on the same advantages.
    Raises ConfigError: names the setting, the value and the remedy.
    """
    estimator, surrogate = find_estimator(advantage.estimator), find_surrogate(loss.surrogate)
    find_correction(loss.correction)
    _check_inputs("advantage.estimator", advantage, estimator, {*ESTIMATOR_SETTINGS, "baseline", "scale"})
    _check_inputs("loss.surrogate", loss, surrogate, {*surrogate.clip_knobs, "dual_clip", "cap"})
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
    own_ratio = advantage.rho_bar_pg is not None or estimator.weighs
    need(
        steps_per_batch == 1 or not own_ratio,
        f"advantage.estimator={advantage.estimator!r} with advantage.rho_bar_pg={advantage.rho_bar_pg} puts the ratio "
        f"pi/mu into the advantages, which {steps_per_batch} optimizer steps share: all but the first would have a "
        "wrong one. Use a surrogate that carries the ratio (loss.surrogate=ppo_clip, advantage.rho_bar_pg=null), or "
        "learner.num_minibatches=1 learner.num_epochs=1.",
    )
    _check_baseline(advantage, estimator)
    _check_correction(loss, surrogate)
    _check_masks(loss)
    _check_surrogate(loss, surrogate)


def _check_inputs(setting: str, config: AdvantageConfig | LossConfig, entry: Entry, known: Set[str]) -> None:
    """A parameter without a default is an input, a knob with a setting of its own, or set among the options."""
    section, _, key = setting.partition(".")
    for name in entry.without_value:
        need(
            name in known or name in config.options,
            f"{setting}={getattr(config, key)}: its parameter {name!r} is no input and has no value."
            f"{did_you_mean(name, entry.INPUTS)} Give it a default or set {section}.options.{name}=VALUE; inputs are "
            f"{', '.join(entry.INPUTS)}.",
        )


def unguarded(advantage: AdvantageConfig, loss: LossConfig, *, eta: int) -> str:
    """A warning about a policy gradient on a critic that nothing keeps near its old data; empty if all is well."""
    vetoes = (loss.veto_low, loss.veto_high, loss.veto_kl)
    guards = (loss.opsm_delta, loss.zscore_bound, *vetoes, loss.behavior_penalty or None)
    guarded = not brings_no_ratio(loss) or loss.correction != "disabled" or any(one is not None for one in guards)
    if guarded or eta <= _SAFE_ETA or not find_estimator(advantage.estimator).needs_critic:
        return ""
    return (
        f"advantage.estimator={advantage.estimator} with loss.surrogate={loss.surrogate} has nothing that keeps the "
        f"policy near data that are up to {eta} batches old: such runs collapse (docs/staleness.md). Set "
        f"loss.opsm_delta=0.05 or take algorithm=vtrace, or set staleness.eta to {_SAFE_ETA} or less."
    )


def _check_estimator(advantage: AdvantageConfig, estimator: Estimator) -> None:
    """Knobs of this estimator in range, and knobs of others untouched."""
    name, knobs = advantage.estimator, estimator.knobs
    others = [knob for knob in ESTIMATOR_SETTINGS if knob not in knobs]
    unused("advantage", advantage, others, f"with advantage.estimator={name!r}")
    own = knobs - {*ESTIMATOR_SETTINGS, "baseline", "scale"}
    unknown, known = sorted(set(advantage.options) - own), ", ".join(sorted(own)) or "none"
    need(not unknown, f"advantage.options holds {unknown}, which {name!r} does not have; it has: {known}.")
    if estimator.of_segments:
        unused("advantage", advantage, ["discount"], "on segments, which are discounted once each")
    elif advantage.gamma == 1.0:
        unused("advantage", advantage, ["discount"], "with advantage.gamma=1, which discounts nothing")
    need(
        "rho_bar" not in knobs or advantage.c_bar <= advantage.rho_bar,
        f"advantage.c_bar={advantage.c_bar} must lie between 0 and advantage.rho_bar={advantage.rho_bar}.",
    )
    need(
        advantage.rho_bar_ess_target is None or ("rho_bar" in knobs and advantage.rho_bar == 1.0),
        "advantage.rho_bar_ess_target chooses the rho_bar of V-trace estimators by itself; with advantage.estimator="
        f"{name!r} and advantage.rho_bar={advantage.rho_bar} it cannot.",
    )
    # A setting without effect is a mistake about the run: it is refused, not ignored.
    if not estimator.of_segments:
        unused("advantage", advantage, ["segment"], f"without an estimator of segments (vtrace_segments), got {name!r}")
    if advantage.segment is not Segment.block:
        unused("advantage", advantage, ["segment_tokens"], "without advantage.segment=block")


def _check_baseline(advantage: AdvantageConfig, estimator: Estimator) -> None:
    name, baseline, scale = advantage.estimator, advantage.baseline, advantage.scale
    need(
        advantage.by is AdvantageBy.trajectory or (estimator.of_rows and baseline in AGENT_BASELINES),
        f"advantage.by=agent compares each agent with the same agent in its group, and advantage.estimator={name!r} "
        f"with advantage.baseline={baseline!r} does not: use group with leave_one_out, group_mean or none.",
    )
    weighted = baseline in WEIGHTED_BASELINES
    if estimator.of_rows:
        others = {"baseline", "scale"} - estimator.knobs
        unused("advantage", advantage, others, f"with advantage.estimator={name!r}, which has no such argument")
    need(
        not estimator.whitens or (scale == "none" and advantage.whiten == "none"),
        f"advantage.estimator={name!r} whitens over the batch itself: set advantage.scale=none and "
        "advantage.whiten=none.",
    )
    # Weighted baselines and critics leave no group whose spread would be a scale.
    need(
        scale == "none" or not (estimator.needs_critic or weighted),
        f"advantage.scale={scale!r} divides the centered scores of plain groups; with advantage.estimator={name!r} "
        f"and advantage.baseline={baseline!r} use advantage.whiten=batch.",
    )
    if not weighted:
        unused("advantage", advantage, ["weight_cap", "min_ess"], f"with advantage.baseline={baseline!r}")


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
        unused("loss", loss, ["anchor"], f"with loss.surrogate={name!r}")
    need(
        not surrogate.needs_proximal or anchor != "behavior",
        f"loss.surrogate={name} needs {proximal} (or take a surrogate on the behavior policy, as ppo_clip).",
    )
    if anchor != "ewma":
        unused("loss", loss, ["ewma_decay"], "without loss.anchor=ewma")


def _check_masks(loss: LossConfig) -> None:
    if loss.veto_low is None and loss.veto_high is None:
        unused("loss", loss, ["veto_stat"], "without loss.veto_low or loss.veto_high")
        if loss.veto_kl is None:
            unused("loss", loss, ["veto_scope"], "without loss.veto_low, loss.veto_high or loss.veto_kl")
    if loss.veto_stat is VetoStat.mean:
        unused("loss", loss, ["veto_kl", "veto_scope"], "with loss.veto_stat=mean, which looks at no single token")
    # Bounds that exclude 1 would drop fresh data, whose ratios are 1.
    low, high = loss.veto_low or 0.0, loss.veto_high or float("inf")
    need(
        0.0 <= low < 1.0 < high,
        f"loss.veto_low={loss.veto_low} and loss.veto_high={loss.veto_high} must lie around 1.",
    )
    if loss.opsm_delta is None:
        unused("loss", loss, ["opsm_when"], "without loss.opsm_delta")


def _check_surrogate(loss: LossConfig, surrogate: Surrogate) -> None:
    name, own = loss.surrogate, surrogate.knobs - {*surrogate.clip_knobs, "dual_clip", "cap"}
    need(
        loss.cap is None or "cap" in surrogate.knobs,
        f"loss.cap={loss.cap} does nothing with loss.surrogate={name!r}, which truncates no weight.",
    )
    # What a setting of its own decides cannot be set a second time among the options.
    unknown, free = sorted(set(loss.options) - own), ", ".join(sorted(own)) or "none"
    need(not unknown, f"loss.options holds {unknown}; loss.surrogate={name!r} takes there: {free}.")
    need(
        not surrogate.whole_row or loss.avg_level == "seq-mean-token-mean",
        f"loss.surrogate={name!r} is defined for loss.avg_level='seq-mean-token-mean' only.",
    )
    need(
        surrogate.max_clip is None or max(loss.clip_low, loss.clip_high) <= surrogate.max_clip,
        f"loss.surrogate={name!r} takes a ratio that stays near 1; with loss.clip_low={loss.clip_low} and "
        f"loss.clip_high={loss.clip_high} it would never clip: set at most {surrogate.max_clip} (gspo: 3e-4 and 4e-4).",
    )


def unused(section: str, config: Any, names: Iterable[str], why: str) -> None:
    """Refuse settings that are not at their defaults though they do nothing; `why` says where."""
    for name in names:
        value = getattr(config, name)
        shown = getattr(value, "name", value)
        need(value == getattr(type(config)(), name), f"{section}.{name}={shown} does nothing {why}.")


def one_of(key: str, value: str, known: Collection[str]) -> None:
    """Refuse a name that is not in the list."""
    need(value in known, f"{key}={value!r} is unknown: choose one of {', '.join(known)}.")


def need(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`."""
    if not condition:
        raise ConfigError(message)
