"""The live display's state of a run, and the numbers derived from it. Pure: dicts and times in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.metrics.diagnosis import diagnosis_of, learner_idle
from streamrl.metrics.rows import Rows

NUM_LOG_LINES = 30
NUM_RECENT_STEPS = 20
"""Steps over which rates and the time left are averaged."""
NUM_WHOLE_ROWS = 3 * NUM_RECENT_STEPS
"""Rows of which everything is kept: some have no step's values. A run may have a million, with 26 kB each."""
DRAWN_WHOLE = ("step", "reward/mean", "reward/recent", "eval/score", "lag/head_max")
"""Kept of all rows: what is drawn of the whole run."""
PATIENCE_S = 3.0
"""A wait is named once it is longer than this, and than twice a step."""


@dataclass(slots=True)
class ViewState:
    """The state of the display. `update` takes a line of `metrics.jsonl` or the whole of `status.json`.

    Attributes:
        name: the run's directory; about: task and model, in words.
        actors: (id, state, version, tokens per second, seconds since its last message) of each.
        rows: of `metrics.jsonl`; only the newest are whole.
        waiting_for: what the hub waits for, in words; empty if it does not wait.
        learner: what the learner does, in words; empty before the hub has heard of it.
        total_steps: 0 while unknown.
        began, now, changed_at: seconds; the time of the start, of the last poll, and of the last new step or state.
    """

    name: str = ""
    about: str = ""
    state: str = "starting"
    total_steps: int = 0
    max_lag: int | None = None
    waiting_for: str = ""
    learner: str = ""
    actors: list[Sequence[Any]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    began: float = 0.0
    now: float = 0.0
    changed_at: float = 0.0

    def update(self, news: Mapping[str, Any]) -> None:
        """An object with `step` is a metrics line, anything else is a status."""
        if "step" not in news:
            self.changed_at = self.now if news.get("state", self.state) != self.state else self.changed_at
            for name in ("state", "total_steps", "max_lag", "waiting_for", "learner", "actors", "counters", "notices"):
                if name in news:
                    setattr(self, name, news[name])
            return
        # A resumed run repeats the steps after its checkpoint: their old rows are void.
        while self.rows and self.rows[-1]["step"] >= news["step"] and "time/step_s" in news:
            self.rows.pop()
        self.rows.append(news)
        if len(self.rows) > NUM_WHOLE_ROWS:
            old = self.rows[-NUM_WHOLE_ROWS - 1]
            self.rows[-NUM_WHOLE_ROWS - 1] = {key: old[key] for key in DRAWN_WHOLE if key in old}
        self.changed_at = self.now

    def log(self, line: str) -> None:
        """Keep a line of a process's log."""
        self.log_lines = [*self.log_lines, line][-NUM_LOG_LINES:]

    @property
    def table(self) -> Rows:
        """The rows as columns."""
        return Rows(self.rows)

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def phase(self) -> str:
        """The present activity in words: the thing waited for only if that takes long, else the bottleneck."""
        if self.state in ("finished", "stopped"):
            return self.state
        quiet_s = self.now - self.changed_at
        if self.waiting_for and (not self.rows or quiet_s > max(PATIENCE_S, 2 * self.step_s)):
            return f"waiting: {self.waiting_for}"
        diagnosis = diagnosis_of(self.rows, NUM_RECENT_STEPS)
        return diagnosis.text if diagnosis else "training" if self.rows else self.state

    @property
    def step_s(self) -> float:
        """Mean time of a recent step of this start of the learner; 0 before two are known."""
        epoch = self.rows[-1].get("run/epoch") if self.rows else None  # between two starts of a learner lies its start
        recent = [row for row in self.rows[-NUM_RECENT_STEPS - 1 :]
                  if "run/wall_s" in row and row.get("run/epoch") == epoch]
        if len(recent) < 2 or recent[-1]["step"] == recent[0]["step"]:
            return 0.0
        return float(recent[-1]["run/wall_s"] - recent[0]["run/wall_s"]) / (recent[-1]["step"] - recent[0]["step"])

    @property
    def time_left_s(self) -> float | None:
        """Steps left times the mean time of recent ones; None until two steps are known."""
        return self.step_s * max(0, self.total_steps - self.step) if self.step_s and self.total_steps else None

    @property
    def wait_share(self) -> float | None:
        """Share of recent time that the learner waited for a batch."""
        return learner_idle(self.rows, NUM_RECENT_STEPS)
