"""The tables of estimators and surrogates, and the rule that a term carries exactly one importance weight.

The step from mu to pi can be covered by the estimator (`clipped_is`, or V-trace with `rho_bar_pg`), by a surrogate
anchored on mu, by a bypass weight pi/mu, or in two halves: a decoupled weight pi_prox/mu and a ratio pi/pi_prox. Masks
are not weights and combine with anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from streamrl.algorithms.checks import require
from streamrl.algorithms.estimators.groups import group_advantages, reinforce_pp_advantages
from streamrl.algorithms.estimators.retrace import retrace_q, retrace_v
from streamrl.algorithms.estimators.returns import clipped_is, gae, n_step, td_lambda
from streamrl.algorithms.estimators.vtrace import vtrace, vtrace_critic_free, vtrace_segments
from streamrl.algorithms.surrogates.clipped import decoupled_ppo, gmpo, gspo, m2po, ppo_clip, sapo
from streamrl.algorithms.surrogates.corrections import CORRECTION_PRESETS
from streamrl.algorithms.surrogates.weighted import (
    aipo,
    cispo,
    dppo_kl,
    dppo_tv,
    mis,
    reinforce,
    seq_tis,
    tis,
    topr,
    vespo,
)

__all__ = ["ANCHORS", "ESTIMATORS", "SURROGATES", "check_pairing"]

ESTIMATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "group": group_advantages,
        "reinforce_pp": reinforce_pp_advantages,
        "vtrace": vtrace,
        "vtrace_segments": vtrace_segments,
        "vtrace_critic_free": vtrace_critic_free,
        "retrace_v": retrace_v,
        "retrace_q": retrace_q,
        "gae": gae,
        "td_lambda": td_lambda,
        "n_step": n_step,
        "clipped_is": clipped_is,
    }
)

SURROGATES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "reinforce": reinforce,
        "ppo_clip": ppo_clip,
        "decoupled_ppo": decoupled_ppo,
        "tis": tis,
        "cispo": cispo,
        "aipo": aipo,
        "seq_tis": seq_tis,
        "mis": mis,
        "icepop": mis,
        "dis": mis,
        "gspo": gspo,
        "gmpo": gmpo,
        "topr": topr,
        "sapo": sapo,
        "vespo": vespo,
        "m2po": m2po,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
    }
)

ANCHORS = ("behavior", "recomputed", "loglinear", "ewma")
_OWN_RATIO_KNOB = ("vtrace", "vtrace_segments", "vtrace_critic_free")  # estimators with `rho_bar_pg`


def check_pairing(
    estimator: str,
    surrogate: str,
    *,
    anchor: str = "behavior",
    correction: str = "disabled",
    rho_bar_pg: float | None = None,
    max_lag: int = 0,
    allow_uncorrected: bool = False,
) -> None:
    """Refuse a combination that weighs the step from mu to pi twice, or not at all where data are stale.

    Args:
        anchor: whose log-probs the surrogate's ratio is taken against: "behavior", "recomputed", "loglinear", "ewma",
            or "none" for `reinforce`. Only `ppo_clip` and `decoupled_ppo` accept a proximal one; every other
            denominator is the recorded behavior log-prob.
        correction: a key of `CORRECTION_PRESETS`.
        rho_bar_pg: the estimator's knob, if set.
        max_lag: with 0 a missing ratio is harmless.
        allow_uncorrected: permit a missing ratio, for a negative control. Never permits two.
    Raises:
        ValueError: unknown names, a double or a missing ratio; the message says which parts carry it.
    """
    for kind, name, table in (
        ("estimator", estimator, ESTIMATORS),
        ("surrogate", surrogate, SURROGATES),
        ("correction", correction, CORRECTION_PRESETS),
        ("anchor", anchor, (*ANCHORS, "none")),
    ):
        require(name in table, f"unknown {kind} {name!r}, expected one of {', '.join(sorted(table))}")
    require(
        rho_bar_pg is None or estimator in _OWN_RATIO_KNOB,
        f"rho_bar_pg={rho_bar_pg} does nothing with estimator={estimator!r}: only {', '.join(_OWN_RATIO_KNOB)} have it",
    )
    _check_anchor(surrogate, anchor)
    whole, first_half, second_half = _carriers(estimator, surrogate, anchor, correction, rho_bar_pg)
    combination = f"estimator={estimator!r}, surrogate={surrogate!r}, anchor={anchor!r}, correction={correction!r}"
    carriers = " and ".join(whole + first_half + second_half)
    require(
        len(whole) + len(first_half) <= 1 and len(whole) + len(second_half) <= 1,
        f"{combination}: the ratio pi/mu is applied more than once, by {carriers}",
    )
    covered = bool(whole) or (bool(first_half) and bool(second_half))
    require(
        covered or max_lag <= 0 or allow_uncorrected,
        f"{combination}: nothing applies the whole ratio pi/mu although max_lag={max_lag} > 0 "
        f"(found {' and '.join(first_half + second_half) or 'nothing'}); "
        "allow_uncorrected=True permits this as a negative control",
    )


def _check_anchor(surrogate: str, anchor: str) -> None:
    if surrogate in ("ppo_clip", "decoupled_ppo"):
        require(anchor != "none", f"surrogate={surrogate!r} needs an anchor, got anchor='none'")
    elif surrogate != "reinforce":
        require(
            anchor == "behavior",
            f"surrogate={surrogate!r} divides by the recorded behavior log-prob, got anchor={anchor!r}",
        )


def _carriers(
    estimator: str, surrogate: str, anchor: str, correction: str, rho_bar_pg: float | None
) -> tuple[list[str], list[str], list[str]]:
    """Who covers mu -> pi as a whole, who mu -> prox, who prox -> pi."""
    whole, first_half, second_half = [], [], []
    if estimator == "clipped_is":
        whole.append("estimator clipped_is")
    if rho_bar_pg is not None:
        whole.append(f"estimator {estimator} with rho_bar_pg={rho_bar_pg}")
    if surrogate == "ppo_clip" and anchor != "behavior":
        second_half.append(f"surrogate ppo_clip on the {anchor} anchor (pi/pi_prox)")
    elif surrogate != "reinforce":
        whole.append(f"surrogate {surrogate}")
    spec = CORRECTION_PRESETS[correction]
    if spec.weight != "none" and spec.mode == "bypass":
        whole.append(f"correction {correction}")
    elif spec.weight != "none":
        first_half.append(f"correction {correction} (pi_prox/mu)")
    return whole, first_half, second_half
