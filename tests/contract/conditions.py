"""Metrics that a run with certain settings must write, and no others: launched runs compare their lines with this."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from streamrl.algorithms.registry import ESTIMATOR_ENTRIES
from streamrl.metrics.names import METRICS, lookup

Settings = Mapping[str, Any]
"""`config.json` as nested dicts, and under `device` the learner's device, from `summary.json`."""

CRITIC_ESTIMATORS = {name for name, one in ESTIMATOR_ENTRIES.items() if one.needs_critic}
TRACE_ESTIMATORS = {
    name for name, one in ESTIMATOR_ENTRIES.items() if {"lam", "c_bar"} <= set(one.knobs) and not one.of_segments
}
BY_KIND = ("num_dropped_", "num_malformed_", "num_returned_", "num_wire_errors_")
"""Beginnings of the members of `hub/*`."""


def _kl(s: Settings) -> bool:
    return s["kl"]["mode"] != "off"


def _archive(s: Settings) -> bool:
    return s["eval"]["num_samples"] > 0 and len(s["objectives"]["components"]) > 1


HOLDS: dict[str, Callable[[Settings], bool]] = {
    "eval": lambda s: s["eval"]["num_samples"] > 0,
    "responses": lambda s: s["eval"]["num_samples"] > 0 and s["eval"]["num_responses"] > 1,
    "archive": _archive,
    "hypervolume": lambda s: _archive(s) and 2 <= len(s["objectives"]["reference_point"]) <= 4,
    "audit": lambda s: s["trust"]["audit_share"] > 0,
    "siblings": lambda s: s["rollout"]["num_responses_per_prompt"] > 1,
    "reweight": lambda s: s["staleness"]["mode"] == "reweight",
    "mask_old": lambda s: s["staleness"]["mode"] == "mask_old_tokens",
    "sets": lambda s: any(
        s["rollout"]["train"]["sampling"][key] != off for key, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0))
    ),
    "trace": lambda s: s["advantage"]["estimator"] in TRACE_ESTIMATORS,
    "critic": lambda s: s["advantage"]["estimator"] in CRITIC_ESTIMATORS,
    "rho_bar": lambda s: s["advantage"]["rho_bar_ess_target"] is not None,
    "veto": lambda s: any(s["loss"][f"veto_{bound}"] is not None for bound in ("low", "high", "kl")),
    "opsm": lambda s: s["loss"]["opsm_delta"] is not None,
    "zscore": lambda s: s["loss"]["zscore_bound"] is not None,
    "correction": lambda s: s["loss"]["correction"] != "disabled",
    "gradient_cosine": lambda s: s["learner"]["gradient_cosine"],
    "stop_kl": lambda s: s["learner"]["stop_kl"] is not None,
    "kl": _kl,
    "reference": lambda s: _kl(s) or s["constraint"]["kl_limit"] is not None,
    "distill": lambda s: s["distill"]["teacher"] is not None,
    "supervised": lambda s: False,  # launched runs are RL
    "entropy_bonus": lambda s: s["loss"]["entropy_coef"] > 0 or s["entropy"]["adapt"] == "coef",
    "clip_high": lambda s: s["entropy"]["adapt"] == "clip_high",
    "shadow": lambda s: bool(s["shadow"]["algorithms"]),
    "gpu": lambda s: s["device"] == "cuda",
    "gpu_transport": lambda s: bool({"nccl", "ipc"} & set(s["publish"]["transports"])),
}
"""Name in `streamrl.metrics.names.NEEDS` -> whether a run with these settings writes the keys that need it."""


def missing_and_surplus(written: Collection[str], settings: Settings) -> tuple[list[str], list[str]]:
    """Missing and surplus keys of a whole run.

    Args:
        written: every key of any line of its `metrics.jsonl`, `step` aside.
        settings: of the run, see `Settings`.
    """
    due = {
        key for key, metric in METRICS.items()
        if not key.endswith("/*") and (not metric.needs or HOLDS[metric.needs](settings))
    }
    surplus = set(written) - due
    return sorted(due - set(written)), sorted(key for key in surplus if not _is_free(key))


def _is_free(key: str) -> bool:
    """A member of a family, whose name comes from the task, the settings or the kind of an error."""
    head, _, last = key.partition("/")
    in_family = key not in METRICS and lookup(key).key in (f"{head}/*", f"{head}/*/*")
    return in_family and (head != "hub" or last.startswith(BY_KIND))
