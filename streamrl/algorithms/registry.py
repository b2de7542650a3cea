"""The tables of estimators and surrogates, and the rule that a term carries exactly one importance weight.

    an entry of ESTIMATOR_ENTRIES, SURROGATE_ENTRIES or CORRECTION_PRESETS   adds an algorithm: nothing else lists names
    `package.module:attribute` in a setting                                  names a user's own function or entry

A function's parameters say what it needs. One that is called like an input (`ESTIMATOR_INPUTS`, `SURROGATE_INPUTS`) is
given that input; every other is a knob, filled by the setting of the same meaning or by `advantage.options` and
`loss.options`. Legend: B trajectories of a micro-batch, T tokens, P trajectories of the whole batch.

The step from mu to pi can be covered by the estimator (`clipped_is`, or V-trace with `rho_bar_pg`), by a surrogate
anchored on mu, by a bypass weight pi/mu, or in two halves: a decoupled weight pi_prox/mu and a ratio pi/pi_prox. Masks
are not weights and combine with anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from streamrl.algorithms import surrogates
from streamrl.algorithms.checks import described, fits, name_of, require
from streamrl.algorithms.corrections import CORRECTION_PRESETS
from streamrl.algorithms.groups import group_advantages, optimal_advantages, reinforce_pp_advantages
from streamrl.algorithms.returns import (
    clipped_is,
    gae,
    n_step,
    retrace_q,
    retrace_v,
    td_lambda,
    vtrace,
    vtrace_critic_free,
    vtrace_segments,
)
from streamrl.algorithms.staleness import clip_from_budget
from streamrl.algorithms.types import ClipBounds, CorrectionSpec, Returns, SegmentReturns, TokenLoss
from streamrl.errors import ConfigError
from streamrl.extension import resolve

__all__ = [
    "ANCHORS", "ESTIMATORS", "ESTIMATOR_ENTRIES", "ESTIMATOR_INPUTS", "SURROGATES", "SURROGATE_ENTRIES",
    "SURROGATE_INPUTS", "Estimator", "Surrogate", "check_pairing", "find_correction", "find_estimator",
    "find_surrogate",
]


T = TypeVar("T")

SURROGATE_INPUTS: Mapping[str, str] = MappingProxyType({
    "policy_logprobs": "[B, T] of the current policy, differentiable",
    "behavior_logprobs": "[B, T] as the actor recorded them",
    "proximal_logprobs": "[B, T] of the policy that `loss.anchor` names",
    "anchor_logprobs": "[B, T] of that policy, or the recorded ones under `loss.anchor=behavior`",
    "advantages": "[B, T] without the token's own ratio",
    "mask": "bool [B, T], action tokens",
    "lags": "int64 [B, T], optimizer steps since the token was sampled",
    "bounds": "what the entry's `fit` returned for the whole batch",
})
ESTIMATOR_INPUTS: Mapping[str, str] = MappingProxyType({
    "scores": "[B] minus the baseline, divided by the scale; with `group_ids` float64 [P], unchanged",
    "group_ids": "int64 [P]; its presence makes an estimator of whole trajectories, which returns [P]",
    "pool_ids": "int64 [P], or None for one pool: a row without another in its group is compared with its pool",
    "baselines": "[B] zeros: they are already subtracted from the scores",
    "rewards": "[B, T], including any shaping",
    "behavior_logprobs": "[B, T] as the actor recorded them",
    "policy_logprobs": "[B, T] of the current policy",
    "mask": "bool [B, T], action tokens",
    "values": "[B, T] of a critic",
    "bootstrap_values": "[B] of a critic, after the last token of truncated trajectories",
    "q_values": "[B, T] of a critic of action values, for the tokens taken",
    "expected_q": "[B, T] of a critic of action values, under the policy",
    "segment_ids": "int64 [B, T] of `advantage.segment`",
    "moments": "of the returns or scores over all tokens of the batch",
})


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(name for name, p in inspect.signature(function).parameters.items() if p.kind not in kinds)


@dataclass(frozen=True)
class Entry:
    """A function and the inputs and knobs that its parameters name; no setting may reach the knobs in `fixed`."""

    INPUTS: ClassVar[Mapping[str, str]] = MappingProxyType({})

    function: Callable[..., Any]
    fixed: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The parameters that are inputs."""
        return tuple(name for name in _parameters(self.function) if name in self.INPUTS)

    @property
    def knobs(self) -> frozenset[str]:
        """The parameters that settings may fill."""
        return frozenset(_parameters(self.function)) - self.INPUTS.keys() - set(self.fixed)

    @property
    def without_value(self) -> list[str]:
        """The knobs that have no default."""
        found = inspect.signature(self.function).parameters
        return [name for name in found if name in self.knobs and found[name].default is inspect.Parameter.empty]

    def __call__(self, given: Mapping[str, Any], /, **knobs: Any) -> Any:
        """The function's result; of the inputs `given` by name it gets those that it takes."""
        return self.function(**{name: given[name] for name in self.inputs}, **knobs)


@dataclass(frozen=True)
class Surrogate(Entry):
    """A loss per token, `function(**inputs, **knobs)`: a `TokenLoss`, or the losses [B, T] alone.

    The knobs `cap` and `dual_clip` are the settings of these names.

    Attributes:
        weighs: the losses hold the ratio of pi to the behavior or anchor log-probs; None: if the function takes these.
        clip_knobs: the knobs that `loss.clip_low` and `loss.clip_high` set, if the function has them.
        clips_ratio: these knobs bound the ratio itself, by `1 - clip_low` and `1 + clip_high`.
        max_clip: a larger clip distance would never act.
        whole_row: one ratio per trajectory: its tokens must be averaged before trajectories are.
        fit: `(log_ratios, advantages, mask, **knobs)` of the trusted tokens of the whole batch -> the input `bounds`.
    """

    INPUTS = SURROGATE_INPUTS

    weighs: bool | None = None
    clip_knobs: tuple[str, str] = ("eps_low", "eps_high")
    clips_ratio: bool = False
    max_clip: float | None = None
    whole_row: bool = False
    fit: Callable[..., ClipBounds] | None = None

    def __call__(self, given: Mapping[str, Any], /, **knobs: Any) -> TokenLoss:
        return checked_losses(Entry.__call__(self, given, **knobs), given["policy_logprobs"], self.function)

    @property
    def takes_anchor(self) -> bool:
        """`loss.anchor` has a meaning."""
        return bool({"anchor_logprobs", "proximal_logprobs"} & set(self.inputs))

    @property
    def needs_proximal(self) -> bool:
        """A proximal policy stands beside the behavior policy."""
        return "proximal_logprobs" in self.inputs

    @property
    def usual_anchor(self) -> str:
        """The denominator of the ratio without `loss.anchor`; "none" where none is taken."""
        if self.needs_proximal:
            return "loglinear"
        return "behavior" if {"behavior_logprobs", "anchor_logprobs"} & set(self.inputs) else "none"

    @property
    def applies_ratio(self) -> bool:
        """The losses carry an importance ratio."""
        return self.usual_anchor != "none" if self.weighs is None else self.weighs

    @property
    def clips(self) -> bool:
        """`loss.clip_low` and `loss.clip_high` reach it."""
        return set(self.clip_knobs) <= self.knobs

    def set_knobs(
        self, *, clip_low: float, clip_high: float, dual_clip: float | None, cap: float | None
    ) -> dict[str, float | None]:
        """The knobs that have a setting of their own, by their name in the function."""
        edges = (1.0 - clip_low, 1.0 + clip_high) if self.clips_ratio else (clip_low, clip_high)
        values: dict[str, float | None] = {**dict(zip(self.clip_knobs, edges, strict=True)), "dual_clip": dual_clip}
        if cap is not None:  # without the setting each function keeps its usual cap
            values["cap"] = cap
        return {name: value for name, value in values.items() if name in self.knobs}


@dataclass(frozen=True)
class Estimator(Entry):
    """Advantages, `function(**inputs, **knobs)`: a tensor [B, T] or [P], `Returns` or `SegmentReturns`.

    The knobs gamma, lam, rho_bar, c_bar, rho_bar_pg, baseline and scale are the settings of these names.

    Attributes:
        weighs: the advantages hold the token's own ratio pi/mu.
        scales_scores: every advantage is the trajectory's centered score times a factor: without the one, without both.
        whitens: over the whole batch; with a baseline it whitens the centered scores instead of calling the function.
    """

    INPUTS = ESTIMATOR_INPUTS

    weighs: bool = False
    scales_scores: bool = False
    whitens: bool = False

    def __call__(self, given: Mapping[str, Any], /, **knobs: Any) -> Tensor | Returns | SegmentReturns:
        found, like = Entry.__call__(self, given, **knobs), given["scores" if self.of_rows else "mask"]
        return checked_advantages(found, like.shape, self.function, needs_targets=self.needs_critic)

    @property
    def of_rows(self) -> bool:
        """Whether it gives one number to a whole trajectory, from the scores of its group."""
        return "group_ids" in self.inputs

    @property
    def needs_critic(self) -> bool:
        """Whether it reads values."""
        return bool({"values", "bootstrap_values", "q_values", "expected_q"} & set(self.inputs))

    @property
    def of_actions(self) -> bool:
        """The critic that it reads is one of action values."""
        return "q_values" in self.inputs

    @property
    def of_segments(self) -> bool:
        """Whether it looks ahead from segment to segment, not from token to token."""
        return "segment_ids" in self.inputs


ESTIMATOR_ENTRIES: Mapping[str, Estimator] = MappingProxyType({
    "group": Estimator(group_advantages, fixed=("eps",)),
    "optimal": Estimator(optimal_advantages),
    "reinforce_pp": Estimator(reinforce_pp_advantages, whitens=True),
    "vtrace": Estimator(vtrace),
    "vtrace_segments": Estimator(vtrace_segments),
    "vtrace_critic_free": Estimator(vtrace_critic_free, scales_scores=True),
    "retrace_v": Estimator(retrace_v),
    "retrace_q": Estimator(retrace_q),
    "gae": Estimator(gae),
    "td_lambda": Estimator(td_lambda),
    "n_step": Estimator(n_step),
    "clipped_is": Estimator(clipped_is, weighs=True),
})

SURROGATE_ENTRIES: Mapping[str, Surrogate] = MappingProxyType({
    "reinforce": Surrogate(surrogates.reinforce, fixed=("weights",)),
    "ppo_clip": Surrogate(surrogates.ppo_clip),
    "decoupled_ppo": Surrogate(surrogates.decoupled_ppo),
    "tis": Surrogate(surrogates.tis),
    "cispo": Surrogate(surrogates.cispo),
    "aipo": Surrogate(surrogates.aipo),
    "seq_tis": Surrogate(surrogates.seq_tis),
    "minpro": Surrogate(surrogates.minpro),
    "mis": Surrogate(surrogates.mis),
    "icepop": Surrogate(surrogates.mis),
    "dis": Surrogate(surrogates.mis, clip_knobs=("low", "high"), clips_ratio=True),
    # The mean ratio of a trajectory stays within about 0.001 of 1: a clip as wide as PPO's would never act.
    "gspo": Surrogate(surrogates.gspo, whole_row=True, max_clip=0.1),
    "gmpo": Surrogate(surrogates.gmpo, whole_row=True),
    "oapl": Surrogate(surrogates.oapl, whole_row=True),
    "flash_reinforce": Surrogate(surrogates.flash_reinforce, whole_row=True),
    "topr": Surrogate(surrogates.topr),
    "sapo": Surrogate(surrogates.sapo),
    "vespo": Surrogate(surrogates.vespo),
    "m2po": Surrogate(surrogates.m2po, clip_knobs=("floor_low", "floor_high"), fit=clip_from_budget),
    "dppo_tv": Surrogate(surrogates.dppo_tv, clip_knobs=("bound_low", "bound_high")),
    "dppo_kl": Surrogate(surrogates.dppo_kl, clip_knobs=("bound_low", "bound_high")),
})

ESTIMATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: entry.function for name, entry in ESTIMATOR_ENTRIES.items()}
)
SURROGATES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: entry.function for name, entry in SURROGATE_ENTRIES.items()}
)
ANCHORS = ("behavior", "recomputed", "loglinear", "ewma")


def find_estimator(name: str) -> Estimator:
    """The entry that `advantage.estimator` names; a user's bare function is `Estimator(function)`."""
    return _find(name, ESTIMATOR_ENTRIES, "advantage.estimator", Estimator, Estimator)


def find_surrogate(name: str) -> Surrogate:
    """The entry that `loss.surrogate` names; a user's bare function is `Surrogate(function)`."""
    return _find(name, SURROGATE_ENTRIES, "loss.surrogate", Surrogate, Surrogate)


def find_correction(name: str) -> CorrectionSpec:
    """The entry that `loss.correction` names.

    A user's bare function `(log_ratios, mask) -> Correction` is a bypass weight: it is given pi/mu and applies it.
    """
    return _find(
        name, CORRECTION_PRESETS, "loss.correction", CorrectionSpec,
        lambda function: CorrectionSpec(mode="bypass", weight="token", function=function),
    )


def _find(name: str, table: Mapping[str, T], setting: str, kind: type[T], wrap: Callable[[Any], T]) -> T:
    found = resolve(name, table, setting=setting)
    if isinstance(found, kind):
        return found
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{setting}={name} is {found!r}: it must be a function or a {kind.__name__}.")
    return wrap(found)


def check_pairing(
    estimator: str, surrogate: str, *, anchor: str = "behavior", correction: str = "disabled",
    rho_bar_pg: float | None = None, max_lag: int = 0, allow_uncorrected: bool = False,
) -> None:
    """Refuse a combination that weighs the step from mu to pi twice, or not at all where data are stale.

    Args:
        estimator, surrogate, correction: names, as in the settings.
        anchor: whose log-probs the surrogate's ratio is taken against: one of `ANCHORS`, or "none" for a surrogate
            without a ratio. Every denominator but that of an anchored surrogate is the recorded behavior log-prob.
        rho_bar_pg: the estimator's knob, if set.
        max_lag: with 0 a missing ratio is harmless.
        allow_uncorrected: permit a missing ratio, for a negative control. Never permits two.
    Raises:
        ValueError: unknown names, a double or a missing ratio; the message says which parts carry it.
    """
    entry, loss = find_estimator(estimator), find_surrogate(surrogate)
    require(anchor in (*ANCHORS, "none"), f"unknown anchor {anchor!r}, expected one of {', '.join(ANCHORS)}, none")
    having = ", ".join(name for name, other in ESTIMATOR_ENTRIES.items() if "rho_bar_pg" in other.knobs)
    require(
        rho_bar_pg is None or "rho_bar_pg" in entry.knobs,
        f"rho_bar_pg={rho_bar_pg} does nothing with estimator={estimator!r}: only {having} have it",
    )
    if loss.takes_anchor:
        require(anchor != "none", f"surrogate={surrogate!r} needs an anchor, got anchor='none'")
    elif loss.usual_anchor != "none":
        wrong = f"surrogate={surrogate!r} divides by the recorded behavior log-prob, got anchor={anchor!r}"
        require(anchor == "behavior", wrong)

    # The components that apply the ratio pi/mu, and those that apply its halves pi_prox/mu and pi/pi_prox.
    whole, first_half, second_half = [], [], []
    if entry.weighs:
        whole.append(f"estimator {estimator}")
    if rho_bar_pg is not None:
        whole.append(f"estimator {estimator} with rho_bar_pg={rho_bar_pg}")
    if "anchor_logprobs" in loss.inputs and anchor != "behavior":
        second_half.append(f"surrogate {surrogate} on the {anchor} anchor (pi/pi_prox)")
    elif loss.applies_ratio:
        whole.append(f"surrogate {surrogate}")
    spec = find_correction(correction)
    if spec.weight != "none":
        bypass = spec.mode == "bypass"
        (whole if bypass else first_half).append(f"correction {correction}" + ("" if bypass else " (pi_prox/mu)"))

    carriers = " and ".join(whole + first_half + second_half)
    combination = f"estimator={estimator!r}, surrogate={surrogate!r}, anchor={anchor!r}, correction={correction!r}"
    require(
        len(whole) + len(first_half) <= 1 and len(whole) + len(second_half) <= 1,
        f"{combination}: the ratio pi/mu is applied more than once, by {carriers}: leave one of them out (a surrogate "
        "without a ratio is reinforce)",
    )
    require(
        bool(whole) or bool(first_half and second_half) or max_lag <= 0 or allow_uncorrected,
        f"{combination}: nothing applies the whole ratio pi/mu although max_lag={max_lag} > 0 (found "
        f"{carriers or 'nothing'}); allow_uncorrected=True permits this as a negative control",
    )


def checked_losses(found: Any, policy_logprobs: Tensor, function: Callable[..., Any]) -> TokenLoss:
    """The result of a surrogate; bare losses clip nothing. Raises ConfigError."""
    shape = policy_logprobs.shape
    if isinstance(found, Tensor):
        found = TokenLoss(found, torch.zeros(shape, dtype=torch.bool, device=policy_logprobs.device))
    wrong = "" if isinstance(found, TokenLoss) else f"returned {described(found)}"
    if not wrong and not fits(found.losses, shape):
        wrong = f"returned losses that are {described(found.losses)}"
    if not wrong and not fits(found.clipped, shape, is_bool=True):
        wrong = f"returned `clipped` that is {described(found.clipped)}"
    if not wrong and torch.is_grad_enabled() and policy_logprobs.requires_grad and not found.losses.requires_grad:
        wrong = "returned losses without a gradient: compute them from policy_logprobs"
    if wrong:
        raise ConfigError(
            f"loss.surrogate={name_of(function)} {wrong}; return TokenLoss(losses=[B, T], clipped=bool [B, T]), or the "
            f"losses alone, a float tensor [B, T] (here {list(shape)}) that depends on policy_logprobs."
        )
    return found


def checked_advantages(
    found: Any, shape: Sequence[int], function: Callable[..., Any], *, needs_targets: bool
) -> Tensor | Returns | SegmentReturns:
    """The result of an estimator for inputs of this shape, [B, T] or [P]. Raises ConfigError."""
    letters = "[P]" if len(shape) == 1 else "[B, T]"
    wrong, usual = "", f"a float tensor {letters} (here {list(shape)})"
    if isinstance(found, Returns | SegmentReturns) and len(shape) == 2:
        for name, part in (("advantages", found.advantages), ("targets", found.targets)):
            if not wrong and not fits(part, shape):
                wrong = f"`{name}` that is {described(part)}"
    elif not fits(found, shape) or needs_targets:
        wrong = described(found)
    if wrong:
        what = f"Returns(advantages, targets), each {usual}, as it reads a critic" if needs_targets else usual
        raise ConfigError(f"advantage.estimator={name_of(function)} returned {wrong}; return {what}.")
    return found
