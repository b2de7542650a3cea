"""The lines of a `metrics.jsonl` read as columns: the one reader of summary, ranking, reports and live display."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SET_SCORE = re.compile(r"eval/[^/]+/score")
"""The score of a set of `eval.datasets`."""
RECENT = {"reward/mean": "reward/recent", "score/mean": "score/recent"}
"""Means over what came in one step, be it one answer, and what a run is judged by: those over the last answers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The lines of a run, in order; each column is made when it is first asked for."""

    rows: Sequence[Mapping[str, Any]]
    _columns: dict[str, tuple[list[int], list[Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False)

    def keys(self) -> list[str]:
        """Every key that some line holds, in order of appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def series(self, key: str) -> tuple[list[int], list[Any]]:
        """Steps and values of the lines that hold `key`, evaluations at the steps that they measure.

        The lists are the table's own.
        """
        if key not in self._columns:
            have, per_batch = [row for row in self.rows if key in row], _steps_per_batch(self.rows)
            self._columns[key] = [_step_of(row, key, per_batch) for row in have], [row[key] for row in have]
        return self._columns[key]

    def values(self, key: str) -> list[Any]:
        """The values of `key`, in order."""
        return self.series(key)[1]

    def last(self, key: str, default: float) -> float:
        """The newest value of `key`."""
        return next((row[key] for row in reversed(self.rows) if key in row), default)

    def total(self, key: str) -> float:
        """Total of a counter over the whole run; a restart of its process may have reset it to 0."""
        total = before = 0.0
        for value in self.values(key):
            total += value - before if value >= before else value
            before = value
        return total

    def histogram(self, key: str) -> dict[int, int]:
        """Histograms of all lines added up, bins in order."""
        total: dict[int, int] = {}
        for row in self.rows:
            for which, count in row.get(key, {}).items():
                total[int(which)] = total.get(int(which), 0) + count
        return dict(sorted(total.items()))

    def judged(self, key: str) -> tuple[list[int], list[Any]]:
        """The series that a run is judged by: of means over what came in a step, those over the last answers."""
        found = self.series(RECENT.get(key, key))
        return found if found[0] else self.series(key)

    def weights(self, key: str) -> list[float]:
        """The number of trajectories behind each value of a mean over those that came; empty if it is not known."""
        counts = self.values("reward/num") if key in RECENT else []
        return counts if len(counts) == len(self.values(key)) else []

    def evaluations(self) -> tuple[list[int], list[float], list[float]]:
        """Steps, scores and standard errors of the evaluations; errors are 0 where they cannot be known.

        A measured error (`eval/score_stderr`) is taken as it is. Without one it is that of a share,
        sqrt(p (1 - p) / n): exact for scores of 0 and 1, and an upper bound for anything between.
        """
        errors = []
        for row in self.rows:
            if "eval/score" in row:
                score, num = row["eval/score"], row.get("eval/num_prompts", 0)
                known = num > 0 and 0 <= score <= 1
                errors.append(row.get("eval/score_stderr", math.sqrt(score * (1 - score) / num) if known else 0.0))
        return *self.series("eval/score"), errors

    def set_scores(self) -> list[tuple[str, float, float]]:
        """Name, first and last score of each set of `eval.datasets`."""
        scores = {key.split("/")[1]: self.values(key) for key in self.keys() if SET_SCORE.fullmatch(key)}
        return [(name, found[0], found[-1]) for name, found in scores.items()]


def _step_of(row: Mapping[str, Any], key: str, per_batch: int) -> int:
    """The step whose weights a value measures: of an evaluation that of its version, however late it arrived."""
    version = row.get(f"{key.rpartition('/')[0]}/version") if key.startswith("eval/") else None
    return int(row["step"] if version is None else version // per_batch)


def _steps_per_batch(rows: Sequence[Mapping[str, Any]]) -> int:
    """Versions of each step of a run, from its newest row that tells."""
    told = ((row["run/version"], row["step"]) for row in reversed(rows) if row.get("run/version") and row["step"])
    version, step = next(told, (1, 1))
    return max(1, int(version // step))
