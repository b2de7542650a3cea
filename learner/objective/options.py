"""Settings of the objective: the functions they name, those functions' knobs, and what is refused.

A setting that is unknown, impossible or without effect is an error before anything is generated. Entries of the
registry say what a function reads (`streamrl.algorithms.registry`); `ALGORITHM_RULES` and `REGULARIZER_RULES` say what
goes together, a row each, and nothing else here lists names of algorithms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from streamrl.algorithms import Surrogate, check_pairing, controllers, find_correction, find_estimator, find_surrogate
from streamrl.algorithms.aggregation import MODES as AVG_LEVELS
from streamrl.algorithms.kl import LOSS_KINDS
from streamrl.algorithms.registry import Entry
from streamrl.algorithms.types import ConstraintState, KlState
from streamrl.config.schema import (
    AdvantageBy,
    AdvantageConfig,
    ConstraintConfig,
    ConstraintMethod,
    DistillConfig,
    EntropyAdapt,
    EntropyConfig,
    KlConfig,
    LossConfig,
    ReferenceConfig,
    Segment,
    VetoStat,
)
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean

WEIGHTED_BASELINES = ("weighted_leave_one_out", "opob")
"""Baselines that need the current policy's ratios, hence a scoring pass."""
BASELINES = ("leave_one_out", "group_mean", "batch", "none", *WEIGHTED_BASELINES)
AGENT_BASELINES = ("leave_one_out", "group_mean", "none")
"""Baselines that `advantage.by=agent` takes."""
AVG_LEVELS_ELSEWHERE = {"token_level": "token-mean", "sample_level": "seq-mean-token-mean"}
"""Names of ColossalAI's `loss_variation`, and ours."""
SCALES = ("none", "std", "batch_std")
_SAFE_ETA = 4
"""The largest lead at which no arm of docs/staleness.md differed from another."""
ESTIMATOR_SETTINGS = ("gamma", "lam", "rho_bar", "c_bar", "rho_bar_pg")
"""Settings that are an estimator's knob of the same name."""
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


# --- what the settings choose ---------------------------------------------------------------------------------------


def surrogate_options(
    loss: LossConfig, *, clip_high: float | None = None, clip_scale: float = 1.0
) -> dict[str, Any]:
    """Knobs of the surrogate that `loss` names.

    Args:
        clip_high: in place of that setting.
        clip_scale: factor on both clip distances.
    """
    high = loss.clip_high if clip_high is None else clip_high
    knobs = find_surrogate(loss.surrogate).set_knobs(
        clip_low=loss.clip_low * clip_scale,
        clip_high=high * clip_scale,
        dual_clip=loss.dual_clip,
        cap=loss.cap,
    )
    return {**knobs, **loss.options}


def clip_scale(loss: LossConfig, step: int, total_steps: int) -> float:
    """Part of the clip distances that is left."""
    if loss.clip_decay is None or not total_steps:
        return 1.0
    done = min(1.0, step / total_steps)
    return 1.0 - done * (1.0 - loss.clip_decay)


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
    # In no row do they cancel: some losses read the ratio of a whole trajectory.
    log_ratios = torch.tensor([[-20.0, -3.0, -0.4, 0.0], [-0.4, -0.05, 0.0, 0.05], [0.0, 0.4, 3.0, 20.0]])
    behavior = torch.full_like(log_ratios, -1.5)
    policy = (behavior + log_ratios).requires_grad_()
    proximal = behavior + 0.5 * log_ratios
    found = surrogate({
        "policy_logprobs": policy, "behavior_logprobs": behavior, "proximal_logprobs": proximal,
        "anchor_logprobs": proximal, "advantages": torch.zeros_like(behavior), "bounds": None,
        "mask": torch.ones_like(behavior, dtype=torch.bool), "lags": torch.arange(12).view(3, 4),
    }, **options).losses
    (slopes,) = torch.autograd.grad(found.sum(), policy, allow_unused=True) if found.requires_grad else (None,)
    return not bool(found.any()) and (slopes is None or not bool(slopes.any()))


def starting_coef(kl: KlConfig) -> float:
    """Weight of the KL term before the first update; 0 if there is no term."""
    if kl.mode == "off":
        return 0.0
    if kl.coef is not None:
        return kl.coef
    return 0.001 if kl.controller == "constant" else 0.2


def beginnings(kl: KlConfig, entropy: EntropyConfig, loss: LossConfig) -> dict[str, Any]:
    """Settings at which weights begin that a controller moves, by their names in a state, and the KL's controller."""
    found: dict[str, Any] = {}
    if kl.controller in CONTROLLERS and kl.mode != "off":
        found |= {"kl": starting_coef(kl), "controller": kl.controller}
    if entropy.adapt is EntropyAdapt.coef:
        found["entropy_coef"] = loss.entropy_coef
    if entropy.adapt is EntropyAdapt.clip_high:
        found["clip_high"] = loss.clip_high
    return found


def going_on(state: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a state that `now` goes on from, the beginnings of a resumed run; else these count."""
    began = state.get("began", now)  # absent in a checkpoint of an earlier release
    # What no controller moved, or from another setting, is no state.
    weights = ("kl", "entropy_coef", "clip_high")
    same = {name: state[name] for name in weights if name in now and began.get(name) == now[name]}
    if "kl" in same and began["controller"] != now["controller"]:
        same["kl"] = {"coef": same["kl"]["coef"]}  # the sums are those of another rule
    return same


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


def violation(value: float, limit: float, sense: str) -> float:
    """By how much a constraint is broken; 0 if it holds."""
    error = controllers.signed_violation(value, limit, sense)
    return max(0.0, float(error))


Violations = dict[str, tuple[int, int, float]]
"""Name of a constraint -> steps, those that broke it, and by how much all of them together."""


def count_violation(violations: Violations, name: str, broken: float) -> dict[str, float]:
    """Count one more step; its metrics, and those of the run so far."""
    num_steps, num_broken, total = violations.get(name, (0, 0, 0.0))
    num_steps, num_broken, total = violations[name] = num_steps + 1, num_broken + (broken > 0.0), total + broken
    return {
        f"constraint/{name}_violation": broken, f"constraint/{name}_satisfied": float(broken == 0.0),
        f"constraint/{name}_violation_mean": total / num_steps, f"constraint/{name}_num_violations": float(num_broken),
    }


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


# --- what is refused --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unused:
    """Settings of a section that must stay at their defaults `when` they would do nothing; `why` says where.

    A setting without effect is a mistake about the run: it is refused, not ignored.
    """

    section: str
    names: tuple[str, ...] | Callable[[Any], Iterable[str]]
    when: Callable[[Any], bool]
    why: str

    def check(self, chosen: SimpleNamespace) -> None:
        """Raise ConfigError for a setting that is not at its default."""
        if self.when(chosen):
            names = self.names(chosen) if callable(self.names) else self.names
            unused(self.section, getattr(chosen, self.section), names, self.why.format_map(vars(chosen)))


@dataclass(frozen=True)
class Need:
    """Settings that must fit to each other."""

    holds: Callable[[Any], bool]
    message: str

    def check(self, chosen: SimpleNamespace) -> None:
        """Raise ConfigError unless they do."""
        if not self.holds(chosen):
            raise ConfigError(self.message.format_map(vars(chosen)))


# The messages are templates: they are filled only for a rule that is broken, when what they name exists.
_PROXIMAL = "a proximal policy: set loss.anchor to recomputed, loglinear or ewma"
ALGORITHM_RULES: tuple[Unused | Need, ...] = (
    Unused("advantage", lambda c: [name for name in ESTIMATOR_SETTINGS if name not in c.estimator.knobs],
           lambda c: True, "with advantage.estimator={advantage.estimator!r}"),
    Need(lambda c: not c.unknown_advantage_options,
         "advantage.options holds {unknown_advantage_options}, which {advantage.estimator!r} does not have; it has: "
         "{advantage_options}."),
    Unused("advantage", ("discount",), lambda c: c.estimator.of_segments,
           "on segments, which are discounted once each"),
    Unused("advantage", ("discount",), lambda c: not c.estimator.of_segments and c.advantage.gamma == 1.0,
           "with advantage.gamma=1, which discounts nothing"),
    Need(lambda c: "rho_bar" not in c.estimator.knobs or c.advantage.c_bar <= c.advantage.rho_bar,
         "advantage.c_bar={advantage.c_bar} must lie between 0 and advantage.rho_bar={advantage.rho_bar}."),
    Need(lambda c: c.advantage.rho_bar_ess_target is None
         or ("rho_bar" in c.estimator.knobs and c.advantage.rho_bar == 1.0),
         "advantage.rho_bar_ess_target chooses the rho_bar of V-trace estimators by itself; with advantage.estimator="
         "{advantage.estimator!r} and advantage.rho_bar={advantage.rho_bar} it cannot."),
    Unused("advantage", ("segment",), lambda c: not c.estimator.of_segments,
           "without an estimator of segments (vtrace_segments), got {advantage.estimator!r}"),
    Unused("advantage", ("segment_tokens",), lambda c: c.advantage.segment is not Segment.block,
           "without advantage.segment=block"),
    Need(lambda c: c.steps_per_batch == 1 or not (c.advantage.rho_bar_pg is not None or c.estimator.weighs),
         "advantage.estimator={advantage.estimator!r} with advantage.rho_bar_pg={advantage.rho_bar_pg} puts the ratio "
         "pi/mu into the advantages, which {steps_per_batch} optimizer steps share: all but the first would have a "
         "wrong one. Use a surrogate that carries the ratio (loss.surrogate=ppo_clip, advantage.rho_bar_pg=null), or "
         "learner.num_minibatches=1 learner.num_epochs=1."),
    Need(lambda c: c.advantage.by is AdvantageBy.trajectory
         or (c.estimator.of_rows and c.advantage.baseline in AGENT_BASELINES),
         "advantage.by=agent compares each agent with the same agent in its group, and advantage.estimator="
         "{advantage.estimator!r} with advantage.baseline={advantage.baseline!r} does not: use group with "
         "leave_one_out, group_mean or none."),
    Unused("advantage", lambda c: {"baseline", "scale"} - c.estimator.knobs, lambda c: c.estimator.of_rows,
           "with advantage.estimator={advantage.estimator!r}, which has no such argument"),
    Need(lambda c: not c.estimator.whitens or (c.advantage.scale == "none" and c.advantage.whiten == "none"),
         "advantage.estimator={advantage.estimator!r} whitens over the batch itself: set advantage.scale=none and "
         "advantage.whiten=none."),
    # Weighted baselines and critics leave no group whose spread would be a scale.
    Need(lambda c: c.advantage.scale == "none" or not (c.estimator.needs_critic or c.weighted),
         "advantage.scale={advantage.scale!r} divides the centered scores of plain groups; with advantage.estimator="
         "{advantage.estimator!r} and advantage.baseline={advantage.baseline!r} use advantage.whiten=batch."),
    Unused("advantage", ("bootstrap_truncated",), lambda c: not c.estimator.needs_critic,
           "with advantage.estimator={advantage.estimator!r}, which has no critic"),
    Unused("advantage", ("weight_cap",), lambda c: not c.weighted, "with advantage.baseline={advantage.baseline!r}"),
    Unused("advantage", ("min_ess",), lambda c: c.advantage.baseline != "weighted_leave_one_out",
           "with advantage.baseline={advantage.baseline!r}"),
    Need(lambda c: c.correction.surrogate in (None, c.loss.surrogate),
         "loss.correction={loss.correction!r} belongs to loss.surrogate={correction.surrogate!r}, not "
         "{loss.surrogate!r}."),
    Need(lambda c: not c.correction.normalize,
         "loss.correction={loss.correction!r} has normalize=True: it divides by the mean weight of a micro-batch, so "
         "that the loss would depend on how a batch is cut into these; leave it at False."),
    Need(lambda c: c.correction.mode != "decoupled" or c.anchor not in ("behavior", "none"),
         "loss.correction={loss.correction!r} weighs pi_prox/mu and needs " + _PROXIMAL + "."),
    Unused("loss", ("anchor",), lambda c: not c.surrogate.takes_anchor, "with loss.surrogate={loss.surrogate!r}"),
    Need(lambda c: not c.surrogate.needs_proximal or c.anchor != "behavior",
         "loss.surrogate={loss.surrogate} needs " + _PROXIMAL + " (or take a surrogate on the behavior policy, such "
         "as ppo_clip)."),
    Unused("loss", ("clip_decay",), lambda c: not c.surrogate.clips,
           "with loss.surrogate={loss.surrogate!r}, which clips nothing by loss.clip_low and loss.clip_high"),
    Unused("loss", ("ewma_decay",), lambda c: c.anchor != "ewma", "without loss.anchor=ewma"),
    Unused("loss", ("veto_stat",), lambda c: c.loss.veto_low is None and c.loss.veto_high is None,
           "without loss.veto_low or loss.veto_high"),
    Unused("loss", ("veto_scope",), lambda c: c.loss.veto_low is c.loss.veto_high is c.loss.veto_kl is None,
           "without loss.veto_low, loss.veto_high or loss.veto_kl"),
    Unused("loss", ("veto_kl", "veto_scope"), lambda c: c.loss.veto_stat is VetoStat.mean,
           "with loss.veto_stat=mean, which looks at no single token"),
    # Bounds that exclude 1 would drop fresh data, whose ratios are 1.
    Need(lambda c: 0.0 <= (c.loss.veto_low or 0.0) < 1.0 < (c.loss.veto_high or float("inf")),
         "loss.veto_low={loss.veto_low} and loss.veto_high={loss.veto_high} must lie around 1."),
    Unused("loss", ("opsm_when",), lambda c: c.loss.opsm_delta is None, "without loss.opsm_delta"),
    Need(lambda c: c.loss.cap is None or "cap" in c.surrogate.knobs,
         "loss.cap={loss.cap} does nothing with loss.surrogate={loss.surrogate!r}, which truncates no weight."),
    # What a setting of its own decides cannot be set a second time among the options.
    Need(lambda c: not c.unknown_loss_options,
         "loss.options holds {unknown_loss_options}; loss.surrogate={loss.surrogate!r} takes there: {loss_options}."),
    Need(lambda c: not c.surrogate.whole_row or c.loss.avg_level == "seq-mean-token-mean",
         "loss.surrogate={loss.surrogate!r} is defined for loss.avg_level='seq-mean-token-mean' only."),
    Need(lambda c: c.surrogate.max_clip is None or max(c.loss.clip_low, c.loss.clip_high) <= c.surrogate.max_clip,
         "loss.surrogate={loss.surrogate!r} takes a ratio that stays near 1; with loss.clip_low={loss.clip_low} and "
         "loss.clip_high={loss.clip_high} it would never clip: set at most {surrogate.max_clip} (gspo: 3e-4 and "
         "4e-4)."),
)


def check_settings(advantage: AdvantageConfig, loss: LossConfig, *, max_lag: int, steps_per_batch: int = 1) -> None:
    """Refuse what is unknown, impossible, or without effect.

    Args:
        steps_per_batch: optimizer steps on the same advantages.
    Raises ConfigError: names the setting, the value and the remedy.
    """
    # Names come first, because every rule below reads the entries that they name.
    estimator, surrogate = find_estimator(advantage.estimator), find_surrogate(loss.surrogate)
    correction = find_correction(loss.correction)
    of_estimator = {*ESTIMATOR_SETTINGS, "baseline", "scale"}
    of_surrogate = {*surrogate.clip_knobs, "dual_clip", "cap"}
    _check_inputs("advantage.estimator", advantage, estimator, of_estimator)
    _check_inputs("loss.surrogate", loss, surrogate, of_surrogate)
    one_of("advantage.baseline", advantage.baseline, BASELINES)
    one_of("advantage.scale", advantage.scale, SCALES)
    one_of("advantage.whiten", advantage.whiten, ("none", "batch", "group"))
    meant = AVG_LEVELS_ELSEWHERE.get(loss.avg_level)
    need(meant is None, f"loss.avg_level={loss.avg_level} of ColossalAI is loss.avg_level={meant} here.")
    one_of("loss.avg_level", loss.avg_level, AVG_LEVELS)
    try:
        check_pairing(
            advantage.estimator, loss.surrogate, anchor=anchor_of(loss), correction=loss.correction,
            rho_bar_pg=advantage.rho_bar_pg, max_lag=max_lag, allow_uncorrected=loss.allow_uncorrected,
        )
    except ValueError as error:
        raise ConfigError(f"advantage.estimator and loss.surrogate: {error}") from error
    chosen = SimpleNamespace(
        advantage=advantage, loss=loss, estimator=estimator, surrogate=surrogate, correction=correction,
        anchor=anchor_of(loss), weighted=advantage.baseline in WEIGHTED_BASELINES, steps_per_batch=steps_per_batch,
    )
    for name, options, own in (
        ("advantage", advantage.options, estimator.knobs - of_estimator),
        ("loss", loss.options, surrogate.knobs - of_surrogate),
    ):
        setattr(chosen, f"unknown_{name}_options", sorted(set(options) - own))
        setattr(chosen, f"{name}_options", ", ".join(sorted(own)) or "none")
    # In their order: of several broken rules the first is reported, and later ones may follow from it.
    for rule in ALGORITHM_RULES:
        rule.check(chosen)


def _check_inputs(setting: str, config: AdvantageConfig | LossConfig, entry: Entry, known: Collection[str]) -> None:
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


REGULARIZER_RULES: tuple[Unused | Need, ...] = (
    Need(lambda c: c.distill.teacher is not None or c.distill.reward_weight != 0,
         "distillation without rewards (algorithm=distill) needs a teacher: distill.teacher=MODEL"),
    Unused("distill", ("coef", "center", "reward_weight"), lambda c: c.distill.teacher is None,
           "without a teacher: set distill.teacher to a model"),
    Unused("kl", ("coef", "controller", "options", "allow_biased"), lambda c: c.kl.mode == "off", "with kl.mode=off"),
    Need(lambda c: c.kl.allow_biased or not c.biased,
         "kl.mode={kl.mode} on data up to {max_lag} steps old does not have the gradient of the reverse KL: use k2_is "
         "(or k1_is, k3_is), or ask for it with kl.allow_biased=true."),
    Need(lambda c: c.biased or not c.kl.allow_biased,
         "kl.allow_biased=true does nothing with kl.mode={kl.mode}: leave it out."),
    Need(lambda c: c.kl.mode == "off" or c.coef > 0.0 or c.kl.controller == "pid",
         "kl.coef={coef} never pulls: set kl.mode=off, or a positive weight."),
    Need(lambda c: c.kl.mode == "off" or c.kl.controller != "horizon" or "horizon" in c.kl.options,
         "kl.controller=horizon needs kl.options.horizon, in trajectories (e.g. 10000)."),
    Unused("kl", ("cap",), lambda c: not c.truncates_kl,
           "with kl.mode={kl.mode}: it has no truncated weight of its own"),
    # A reference is a second model in memory: one that nothing reads must not be loaded silently.
    Unused("reference", ("model_path", "sync_every_steps"), lambda c: not needs_reference(c.kl, c.constraint),
           "without kl.mode or constraint.kl_limit"),
    Unused("entropy", ("target", "step", "low", "high"), lambda c: c.entropy.adapt is EntropyAdapt.none,
           "with entropy.adapt=none"),
    Need(lambda c: c.entropy.adapt is EntropyAdapt.none or c.entropy.target is not None,
         "entropy.adapt={entropy.adapt.name} needs entropy.target in nats, e.g. 0.2."),
    Need(lambda c: not c.bounds or 0.0 <= c.bounds["low"] < c.bounds["high"],
         "entropy.low={bounds[low]} and entropy.high={bounds[high]} must satisfy 0 <= low < high."),
    Need(lambda c: c.entropy.adapt is not EntropyAdapt.clip_high or find_surrogate(c.loss.surrogate).clips,
         "entropy.adapt=clip_high does nothing with loss.surrogate={loss.surrogate!r}, which has no upper clip: take "
         "one that has, such as ppo_clip, or entropy.adapt=coef."),
    Need(lambda c: c.entropy.adapt is not EntropyAdapt.clip_high or c.loss.anchor != "recomputed"
         or c.steps_per_batch > 1,
         "entropy.adapt=clip_high does nothing with loss.anchor=recomputed: with one optimizer step per batch the "
         "policy is its own anchor, and no ratio reaches a clip. Set learner.num_minibatches or learner.num_epochs, or "
         "use loss.anchor=loglinear or the behavior policy."),
    Unused("constraint", ("method", "options", "one_sided"), lambda c: not constraint_limits(c.constraint),
           "without constraint.kl_limit or constraint.entropy_min"),
    Unused("constraint", ("one_sided",), lambda c: c.constraint.method is ConstraintMethod.penalty,
           "with constraint.method=penalty, which always is"),
)


def check_regularizers(
    kl: KlConfig, reference: ReferenceConfig, entropy: EntropyConfig, constraint: ConstraintConfig, loss: LossConfig, *,
    max_lag: int, steps_per_batch: int = 1, distill: DistillConfig | None = None,
) -> None:
    """Refuse what is unknown, impossible, biased without being asked for, or without effect.

    Args:
        steps_per_batch: optimizer steps that share an anchor.
    Raises ConfigError: names the setting, the value and the remedy.
    """
    need(
        kl.mode not in ("reward_k2", "reward_k3"),
        f"kl.mode={kl.mode} would not be the gradient of a KL: a reward is not differentiated, and the mean derivative "
        "of k1 alone is 0. Take reward_k1, or k2_is or k3_is in the loss.",
    )
    one_of("kl.mode", kl.mode, MODES)
    one_of("kl.controller", kl.controller, ("constant", *CONTROLLERS, "schedule"))
    distill, on = distill or DistillConfig(), kl.mode != "off"
    in_advantages = kl.mode == "advantage" or distill.teacher is not None
    chosen = SimpleNamespace(
        kl=kl, reference=reference, entropy=entropy, constraint=constraint, loss=loss, distill=distill,
        max_lag=max_lag, steps_per_batch=steps_per_batch, coef=starting_coef(kl),
        bounds={} if entropy.adapt is EntropyAdapt.none else _entropy_bounds(entropy),
        # k3's gradient is the forward KL's even on fresh samples; the others are right as long as pi is mu.
        biased=kl.mode == "k3" or (kl.mode in FRESH_ONLY and max_lag > 0),
        truncates_kl=kl.mode == "k2_is" or constraint.kl_limit is not None
        or (in_advantages and brings_no_ratio(loss)),
    )
    for rule in REGULARIZER_RULES:
        rule.check(chosen)
    # One call with a plausible measurement each: a rule itself raises on constants that are impossible for it.
    if on:
        _try_controller(kl, chosen.coef)
    if entropy.adapt is EntropyAdapt.coef:
        _within("loss.entropy_coef", loss.entropy_coef, chosen.bounds, "entropy.low", "entropy.high")
    elif entropy.adapt is EntropyAdapt.clip_high:
        _within("loss.clip_high", loss.clip_high, chosen.bounds, "entropy.low", "entropy.high")
    if constraint_limits(constraint):
        _try_method(constraint)


def _try_controller(kl: KlConfig, coef: float) -> None:
    options = controller_options(kl)
    if kl.controller == "schedule":
        _accepted("kl.options", lambda: controllers.kl_schedule(0, start=coef, **options))
    elif kl.controller != "constant":
        rule, given = CONTROLLERS[kl.controller], {"num_trajectories": 1} if kl.controller == "horizon" else {}
        _accepted("kl.options", lambda: rule(KlState(coef), 0.01, **options, **given))
        _within("kl.coef", coef, {**_knobs(rule), **options}, "kl.options.low", "kl.options.high")


def _try_method(constraint: ConstraintConfig) -> None:
    options, rule = method_options(constraint), DUAL_METHODS.get(constraint.method)
    if rule is None:
        _accepted("constraint.options", lambda: controllers.constraint_penalty(0.0, 1.0, **options))
        need(options["weight"] > 0.0, f"constraint.options.weight={options['weight']} must be positive.")
    else:
        _accepted("constraint.options", lambda: rule(ConstraintState(), 0.0, 1.0, **options))


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
