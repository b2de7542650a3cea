"""Settings of KL, entropy and constraints: the functions they name, those functions' knobs, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from learner.objective.options import brings_no_ratio, need, one_of, unused
from streamrl.algorithms import controllers, find_surrogate
from streamrl.algorithms.kl import LOSS_KINDS
from streamrl.algorithms.types import ConstraintState, KlState
from streamrl.config.schema import (
    ConstraintConfig,
    ConstraintMethod,
    DistillConfig,
    EntropyAdapt,
    EntropyConfig,
    KlConfig,
    LossConfig,
    ReferenceConfig,
)
from streamrl.errors import ConfigError

MODES = ("off", "reward_k1", "advantage", *LOSS_KINDS)
FRESH_ONLY = ("k2", "k1+", "k3+")
"""Kinds of KL loss whose gradient is the reverse KL's only on samples of the policy itself."""
CONTROLLERS: Mapping[str, Callable[..., KlState]] = {
    "exponential": controllers.kl_exponential, "linear": controllers.kl_linear, "pid": controllers.kl_pid,
    "horizon": controllers.kl_horizon, "doubling": controllers.kl_doubling,
    "log_integral": controllers.kl_log_integral,
}
ENTROPY_RULES: Mapping[EntropyAdapt, Callable[..., float]] = {
    EntropyAdapt.coef: controllers.entropy_coef_update, EntropyAdapt.clip_high: controllers.clip_high_update,
}
DUAL_METHODS: Mapping[ConstraintMethod, Callable[..., ConstraintState]] = {
    ConstraintMethod.lagrangian: controllers.lagrangian_update, ConstraintMethod.pid: controllers.pid_lagrangian_update,
}
_GIVEN = ("num_trajectories", "start", "sense", "frozen")  # what the learner itself passes to those functions


def starting_coef(kl: KlConfig) -> float:
    """Weight of the KL term before the first update; 0 if there is no term."""
    if kl.mode == "off":
        return 0.0
    if kl.coef is not None:
        return kl.coef
    return 0.001 if kl.controller == "constant" else 0.2


def controller_options(kl: KlConfig) -> dict[str, Any]:
    """Keyword arguments of the controller; ConfigError names the knobs it has."""
    if kl.controller == "constant":
        return _known("kl.options", kl.options, {}, "kl.controller=constant")
    rule = controllers.kl_schedule if kl.controller == "schedule" else CONTROLLERS[kl.controller]
    return _known("kl.options", kl.options, _knobs(rule), f"kl.controller={kl.controller}")


def entropy_options(entropy: EntropyConfig) -> dict[str, float]:
    """Keyword arguments of the entropy controller; {} without one."""
    if entropy.adapt is EntropyAdapt.none:
        return {}
    assert entropy.target is not None, "entropy.adapt without a target is refused by check_regularizers()"
    return {"target": entropy.target, "step": entropy.step, **_entropy_bounds(entropy)}


def _entropy_bounds(entropy: EntropyConfig) -> dict[str, float]:
    usual = _knobs(ENTROPY_RULES[entropy.adapt])
    return {
        "low": usual["low"] if entropy.low is None else entropy.low,
        "high": usual["high"] if entropy.high is None else entropy.high,
    }


def constraint_limits(constraint: ConstraintConfig) -> dict[str, float]:
    """Name of each constraint -> its limit."""
    limits = {"kl": constraint.kl_limit, "entropy": constraint.entropy_min}
    return {name: limit for name, limit in limits.items() if limit is not None}


def method_options(constraint: ConstraintConfig) -> dict[str, Any]:
    """Keyword arguments of the method of constraints, with the penalty's weight filled in."""
    knobs = _knobs(DUAL_METHODS.get(constraint.method, controllers.constraint_penalty))
    options = _known("constraint.options", constraint.options, knobs, f"constraint.method={constraint.method.name}")
    if constraint.method is ConstraintMethod.penalty:
        options.setdefault("weight", knobs["weight"])
    return options


def needs_reference(kl: KlConfig, constraint: ConstraintConfig) -> bool:
    """Some term reads the reference model's log-probs."""
    return kl.mode != "off" or constraint.kl_limit is not None


def check_regularizers(
    kl: KlConfig, reference: ReferenceConfig, entropy: EntropyConfig, constraint: ConstraintConfig, loss: LossConfig, *,
    max_lag: int, steps_per_batch: int = 1, distill: DistillConfig | None = None,
) -> None:
    """Refuse what is unknown, impossible, biased without being asked for, or without effect.

    Args:
        steps_per_batch: optimizer steps that share an anchor.
    Raises ConfigError: names the setting, the value and the remedy.
    """
    distill = distill or DistillConfig()
    if distill.teacher is None:
        if distill.reward_weight == 0:
            raise ConfigError("distillation without rewards (algorithm=distill) needs a teacher: distill.teacher=MODEL")
        names = ("coef", "center", "reward_weight")
        unused("distill", distill, names, "without a teacher: set distill.teacher to a model")
    _check_kl(kl, max_lag)
    _check_kl_cap(kl, constraint, loss, distill)
    if not needs_reference(kl, constraint):
        names = ("model_path", "sync_every_steps")
        unused("reference", reference, names, "without kl.mode or constraint.kl_limit")
    _check_entropy(entropy, loss, steps_per_batch)
    _check_constraint(constraint)


def _check_kl(kl: KlConfig, max_lag: int) -> None:
    one_of("kl.mode", kl.mode, MODES)
    one_of("kl.controller", kl.controller, ("constant", *CONTROLLERS, "schedule"))
    if kl.mode == "off":
        unused("kl", kl, ("coef", "controller", "options", "allow_biased"), "with kl.mode=off")
        return
    # k3's gradient is the forward KL's even on fresh samples; the others are right as long as pi is mu.
    biased = kl.mode == "k3" or (kl.mode in FRESH_ONLY and max_lag > 0)
    need(
        kl.allow_biased or not biased,
        f"kl.mode={kl.mode} on data up to {max_lag} steps old does not have the gradient of the reverse KL: use k2_is "
        "(or k1_is, k3_is), or ask for it with kl.allow_biased=true.",
    )
    need(biased or not kl.allow_biased, f"kl.allow_biased=true does nothing with kl.mode={kl.mode}: leave it out.")
    coef, options = starting_coef(kl), controller_options(kl)
    need(coef > 0.0 or kl.controller == "pid", f"kl.coef={coef} never pulls: set kl.mode=off, or a positive weight.")
    if kl.controller == "horizon":
        need("horizon" in options, "kl.controller=horizon needs kl.options.horizon, in trajectories (e.g. 10000).")
        options = {**options, "num_trajectories": 1}
    if kl.controller == "schedule":
        _accepted("kl.options", lambda: controllers.kl_schedule(0, start=coef, **options))
    elif kl.controller != "constant":
        rule = CONTROLLERS[kl.controller]
        # One call with a plausible KL: the rule itself raises on constants that are impossible for it.
        _accepted("kl.options", lambda: rule(KlState(coef), 0.01, **options))
        _within("kl.coef", coef, {**_knobs(rule), **options}, "kl.options.low", "kl.options.high")


def _check_kl_cap(kl: KlConfig, constraint: ConstraintConfig, loss: LossConfig, distill: DistillConfig) -> None:
    in_advantages = kl.mode == "advantage" or distill.teacher is not None
    reads = kl.mode == "k2_is" or constraint.kl_limit is not None or (in_advantages and brings_no_ratio(loss))
    if not reads:
        unused("kl", kl, ["cap"], f"with kl.mode={kl.mode}: it has no truncated weight of its own")


def _check_entropy(entropy: EntropyConfig, loss: LossConfig, steps_per_batch: int) -> None:
    if entropy.adapt is EntropyAdapt.none:
        unused("entropy", entropy, ("target", "step", "low", "high"), "with entropy.adapt=none")
        return
    what = f"entropy.adapt={entropy.adapt.name}"
    need(entropy.target is not None, f"{what} needs entropy.target in nats, e.g. 0.2.")
    bounds = _entropy_bounds(entropy)
    need(
        0.0 <= bounds["low"] < bounds["high"],
        f"entropy.low={bounds['low']} and entropy.high={bounds['high']} must satisfy 0 <= low < high.",
    )
    if entropy.adapt is EntropyAdapt.coef:
        _within("loss.entropy_coef", loss.entropy_coef, bounds, "entropy.low", "entropy.high")
        return
    need(
        find_surrogate(loss.surrogate).clips,
        f"{what} does nothing with loss.surrogate={loss.surrogate!r}, which has no upper clip: take one that has, as "
        "ppo_clip, or entropy.adapt=coef.",
    )
    need(
        loss.anchor != "recomputed" or steps_per_batch > 1,
        f"{what} does nothing with loss.anchor=recomputed: with one optimizer step per batch the policy is its own "
        "anchor, and no ratio reaches a clip. Set learner.num_minibatches or learner.num_epochs, or use "
        "loss.anchor=loglinear or the behavior policy.",
    )
    _within("loss.clip_high", loss.clip_high, bounds, "entropy.low", "entropy.high")


def _check_constraint(constraint: ConstraintConfig) -> None:
    if not constraint_limits(constraint):
        names = ("method", "options", "one_sided")
        unused("constraint", constraint, names, "without constraint.kl_limit or constraint.entropy_min")
        return
    if constraint.method is ConstraintMethod.penalty:
        unused("constraint", constraint, ["one_sided"], "with constraint.method=penalty, which always is")
    options = method_options(constraint)
    rule = DUAL_METHODS.get(constraint.method)
    if rule is None:
        _accepted("constraint.options", lambda: controllers.constraint_penalty(0.0, 1.0, **options))
        need(options["weight"] > 0.0, f"constraint.options.weight={options['weight']} must be positive.")
    else:
        _accepted("constraint.options", lambda: rule(ConstraintState(), 0.0, 1.0, **options))


def _knobs(rule: Callable[..., Any]) -> dict[str, Any]:
    """Name -> default of the knobs that a user may set."""
    parameters = inspect.signature(rule).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _GIVEN}


def _known(key: str, options: Mapping[str, Any], knobs: Collection[str], owner: str) -> dict[str, Any]:
    for name, value in options.items():
        if name not in knobs:
            choice = f"it has {', '.join(sorted(knobs))}" if knobs else "it has none"
            raise ConfigError(f"{key}.{name} is no knob of {owner}: {choice}.")
        text = name == "kind"
        if isinstance(value, bool) or not isinstance(value, str if text else int | float):
            raise ConfigError(f"{key}.{name}={value!r} must be a {'name' if text else 'number'}.")
    return dict(options)


def _accepted(key: str, call: Callable[[], object]) -> None:
    """The function itself knows which values are impossible."""
    try:
        call()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _within(key: str, value: float, bounds: Mapping[str, Any], low: str, high: str) -> None:
    need(
        bounds["low"] <= value <= bounds["high"],
        f"{key}={value} starts outside {low}={bounds['low']} and {high}={bounds['high']}: move the start or the bound.",
    )
