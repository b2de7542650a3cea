"""Conditions on a run's settings under which it writes a metric, by the names that rows of the list give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""`config.json` as nested dicts, and under `device` the learner's device, from `summary.json`."""

CRITIC_ESTIMATORS = frozenset({
    "vtrace", "vtrace_segments", "retrace_v", "retrace_q", "gae", "td_lambda", "n_step", "clipped_is"
})
TRACE_ESTIMATORS = frozenset({"vtrace", "vtrace_critic_free"})


@dataclass(frozen=True, slots=True)
class Condition:
    """`words` for the page; `holds` says of a run's settings whether the run writes the keys."""

    words: str
    holds: Callable[[Settings], bool]


def _kl(s: Settings) -> bool:
    return s["kl"]["mode"] != "off"


def _archive(s: Settings) -> bool:
    return s["eval"]["num_samples"] > 0 and len(s["objectives"]["components"]) > 1


CONDITIONS: dict[str, Condition] = {
    "eval": Condition("`eval.num_samples` > 0", lambda s: s["eval"]["num_samples"] > 0),
    "responses": Condition(
        "`eval.num_responses` > 1", lambda s: s["eval"]["num_samples"] > 0 and s["eval"]["num_responses"] > 1
    ),
    "archive": Condition("evaluation, and two or more `objectives.components`", _archive),
    "hypervolume": Condition(
        "the same, and `objectives.reference_point` of two to four",
        lambda s: _archive(s) and 2 <= len(s["objectives"]["reference_point"]) <= 4,
    ),
    "reweight": Condition("`staleness.mode=reweight`", lambda s: s["staleness"]["mode"] == "reweight"),
    "mask_old": Condition("`staleness.mode=mask_old_tokens`", lambda s: s["staleness"]["mode"] == "mask_old_tokens"),
    "trace": Condition("an estimator with token traces", lambda s: s["advantage"]["estimator"] in TRACE_ESTIMATORS),
    "critic": Condition("an estimator with a critic", lambda s: s["advantage"]["estimator"] in CRITIC_ESTIMATORS),
    "rho_bar": Condition("`advantage.rho_bar_ess_target`", lambda s: s["advantage"]["rho_bar_ess_target"] is not None),
    "veto": Condition(
        "`loss.veto_low` or `loss.veto_high`",
        lambda s: s["loss"]["veto_low"] is not None or s["loss"]["veto_high"] is not None,
    ),
    "opsm": Condition("`loss.opsm_delta`", lambda s: s["loss"]["opsm_delta"] is not None),
    "zscore": Condition("`loss.zscore_bound`", lambda s: s["loss"]["zscore_bound"] is not None),
    "correction": Condition("`loss.correction`", lambda s: s["loss"]["correction"] != "disabled"),
    "kl": Condition("`kl.mode`", _kl),
    "reference": Condition(
        "`kl.mode` or `constraint.kl_limit`", lambda s: _kl(s) or s["constraint"]["kl_limit"] is not None
    ),
    "entropy_bonus": Condition(
        "`loss.entropy_coef` > 0 or `entropy.adapt=coef`",
        lambda s: s["loss"]["entropy_coef"] > 0 or s["entropy"]["adapt"] == "coef",
    ),
    "clip_high": Condition("`entropy.adapt=clip_high`", lambda s: s["entropy"]["adapt"] == "clip_high"),
    "gpu": Condition("a learner on a GPU", lambda s: s["device"] == "cuda"),
    "gpu_transport": Condition(
        "`nccl` or `ipc` in `publish.transports`",
        lambda s: bool({"nccl", "ipc"} & set(s["publish"]["transports"])),
    ),
}

