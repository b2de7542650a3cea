"""Ranking of several runs: the value that they are ranked by, and the outcome of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean
from streamrl.metrics.names import lookup
from streamrl.metrics.rows import RECENT, Rows
from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.summary import Summary

NUMBERS = tuple(f.name for f in fields(Summary) if f.type in ("int", "float", "float | None"))
"""The fields of a summary that a run can be ranked by."""


class Outcome(IntEnum):
    """The outcome of a run, best first."""

    finished = 0
    pruned = 1
    unfinished = 2
    failed = 3


def pruned_at(step: int) -> str:
    """The text of `Summary.stopped` for a pruned run."""
    return f"pruned at step {step}"


def outcome(record: RunRecord) -> Outcome:
    """The outcome by the run's state; `unfinished` covers one that goes on, was interrupted or was killed."""
    return Outcome[record.state] if record.state in Outcome.__members__ else Outcome.unfinished


@dataclass(frozen=True, slots=True)
class Objective:
    """The number that runs are ranked by, and which end of it is good.

    Attributes:
        metric: a number of summary.json, or a key of metrics.jsonl (with a slash), of which the last value counts; of
            rewards and scores of one step, that over the last answers.
    Raises:
        ConfigError: there is no such number.
    """

    metric: str = "eval_score_last"
    maximize: bool = True

    def __post_init__(self) -> None:
        if "/" in self.metric:
            try:
                lookup(self.metric)
            except KeyError as error:
                raise ConfigError(
                    f"sweep.metric={self.metric} is no metric: `python -m streamrl.metrics.names` lists them."
                ) from error
        elif self.metric not in NUMBERS:
            raise ConfigError(
                f"sweep.metric={self.metric} is no number of summary.json.{did_you_mean(self.metric, NUMBERS)} "
                "Take one of those, or a metric by its name, such as reward/mean."
            )

    @property
    def series(self) -> str | None:
        """The metric whose values during a run tell how it does; None for a number that exists only at its end."""
        if "/" in self.metric:
            return self.metric
        return "eval/score" if self.metric.startswith("eval_score") else None

    def value(self, record: RunRecord) -> float | None:
        """The run's number; the newest so far of a run without a summary. None if it has none, or no finite one."""
        value: Any = None
        if record.summary is not None and "/" not in self.metric:
            value = getattr(record.summary, self.metric)
        elif self.series is not None:
            value = next((number for _, number in reversed(self.intermediate(record.rows))), None)
        return float(value) if value is not None and math.isfinite(value) else None

    def intermediate(self, rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
        """(step, value) of each value during a run; an evaluation counts at the version that it scored."""
        rows = list(rows)
        if self.series is None:
            return []
        if self.series.startswith("eval/"):
            version = f"{self.series.rpartition('/')[0]}/version"  # of a set, if it is that of a set
            return [(int(row.get(version, row["step"])), row[self.series]) for row in rows if self.series in row]
        recent = RECENT.get(self.series, "")
        rows = [{**row, self.series: row[recent]} if recent in row else row for row in rows]
        return list(zip(*Rows(rows).series(self.series), strict=True))

    def better(self, value: float, than: float) -> bool:
        return value > than if self.maximize else value < than

    def order(self, records: Sequence[RunRecord]) -> list[int]:
        """Indices, best first: finished runs by their number, then pruned, unfinished and failed ones."""
        def place(index: int) -> tuple[int, float]:
            value = self.value(records[index])
            return outcome(records[index]), math.inf if value is None else -value if self.maximize else value

        return sorted(range(len(records)), key=place)

    def __str__(self) -> str:
        return f"{self.metric}, {'highest' if self.maximize else 'lowest'} first"
