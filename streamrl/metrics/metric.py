"""One metric: its key, unit, reduction, meaning, and the condition under which a run writes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """How values of one step become one number; all but `last` work on sums and counts, never on means."""

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

    `needs` names the condition of `streamrl.metrics.conditions` under which a run writes it; empty: every run does.
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
