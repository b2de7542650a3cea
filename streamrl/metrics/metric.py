"""One metric: its key, unit, reduction, meaning, and the condition under which a run writes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """The reduction of one step's values to one number; all but `last` work on sums and counts, never on means."""

    mean = "mean"  # sum of value * weight over sum of weight
    sum = "sum"
    max = "max"
    last = "last"  # the newest value; of several ranks, the lowest rank's
    std = "std"  # population standard deviation, from count, sum and sum of squares
    ess = "ess"  # (sum w)^2 / (n * sum w^2), the normalized effective sample size
    histogram = "histogram"  # count per integer bin
    mean_by_bin = "mean by bin"  # weighted mean per integer bin
    percentile = "percentile"  # derived from a histogram when the step ends; cannot be added to


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the list; `key` ends in `/*` for a family.

    `needs` names the condition in `NEEDS` under which a run writes it; empty: every run does.
    """

    key: str
    unit: str
    reduction: Reduction
    meaning: str
    needs: str = ""


def section(*rows: tuple[str, ...], needs: str = "") -> list[Metric]:
    """Rows of key, unit, reduction, meaning and perhaps a condition; `needs` is that of the rows without one."""
    return [
        Metric(key, unit, Reduction(reduction), meaning, condition[0] if condition else needs)
        for key, unit, reduction, meaning, *condition in rows
    ]


NEEDS = {
    "eval": "`eval.num_samples` > 0",
    "responses": "`eval.num_responses` > 1",
    "archive": "evaluation, and two or more `objectives.components`",
    "hypervolume": "the same, and `objectives.reference_point` of two to four",
    "audit": "`trust.audit_share` > 0, in steps with audited tokens",
    "siblings": "`rollout.num_responses_per_prompt` > 1",
    "reweight": "`staleness.mode=reweight`",
    "mask_old": "`staleness.mode=mask_old_tokens`",
    "sets": "`rollout.train.sampling.top_p`, `top_k` or `min_p`",
    "trace": "an estimator with token traces",
    "critic": "an estimator with a critic",
    "rho_bar": "`advantage.rho_bar_ess_target`",
    "veto": "`loss.veto_low`, `loss.veto_high` or `loss.veto_kl`",
    "opsm": "`loss.opsm_delta`",
    "zscore": "`loss.zscore_bound`",
    "correction": "`loss.correction`",
    "gradient_cosine": "`learner.gradient_cosine`",
    "kl": "`kl.mode`",
    "reference": "`kl.mode` or `constraint.kl_limit`",
    "distill": "`distill.teacher`",
    "supervised": "`streamrl sft`, `dpo` or `train-reward-model`; not all of them",
    "entropy_bonus": "`loss.entropy_coef` > 0 or `entropy.adapt=coef`",
    "clip_high": "`entropy.adapt=clip_high`",
    "shadow": "`shadow.algorithms`",
    "gpu": "a learner on a GPU",
    "gpu_transport": "`nccl` or `ipc` in `publish.transports`",
}
"""Conditions on the settings of a run, in words; tests/contract/conditions.py has them as code, for launched runs."""
