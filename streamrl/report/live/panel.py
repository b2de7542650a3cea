"""The live display: its state, pure (dicts and times in, numbers out), and the panel of a given height that shows it.

On a low terminal the least important lines leave first, so that none is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.metrics.diagnosis import diagnosis_of, learner_idle
from streamrl.metrics.rows import Rows
from streamrl.metrics.text import compact, duration, sparkline, time_left

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


NUM_ACTOR_ROWS = 12
MAX_WIDTH = 120
"""A line that is longer is hard to follow."""
MAX_LOG_LINES = 10
MIN_LOG_LINES = 3
"""With fewer, no line is spent on space between the parts."""
FRAME_LINES, PROGRESS_LINES = 2, 2
SPARK_WIDTH = 30

Line = tuple[str, str | Text]


def render(state: ViewState, height: int = 40, width: int = 100) -> RenderableType:
    """The panel, in at most `height` lines and `MAX_WIDTH` columns."""
    room = height - FRAME_LINES - PROGRESS_LINES
    lines = numbers(state)[: max(1, room)]
    room -= len(lines)
    num_actors = len(state.actors)
    if num_actors > min(NUM_ACTOR_ROWS, room - 1):  # the table has a header, and says how many more there are
        num_actors = max(0, min(NUM_ACTOR_ROWS, room - 2))
    parts: list[RenderableType] = [progress(state), _grid(lines)]
    if num_actors:
        parts.append(actors(state, num_actors))
        room -= 1 + num_actors + (num_actors < len(state.actors))
    spaces = (len(parts) - 1 if state.log_lines else len(parts) - 2) if room > MIN_LOG_LINES + len(parts) else 0
    num_log = min(MAX_LOG_LINES, len(state.log_lines), max(0, room - spaces))
    if num_log:
        text = Text("\n".join(state.log_lines[-num_log:]), style="dim", no_wrap=True, overflow="ellipsis")
        parts.append(text)
    if spaces > 0:
        parts = parts[:2] + [part for later in parts[2:] for part in ("", later)]
    title = Text.assemble(("streamrl", "bold"), " ", state.name)
    about = Text(state.about, style="dim", no_wrap=True, overflow="ellipsis") if state.about else None
    return Panel(Group(*parts), title=title, title_align="left", subtitle=about, subtitle_align="right",
                 border_style="cyan", width=min(width, MAX_WIDTH))


def progress(state: ViewState) -> RenderableType:
    """Steps, a bar, the time taken and left; and below it what the run does."""
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    total = state.total_steps
    bar = ProgressBar(total=total, completed=min(state.step, total)) if total else ""
    wall_s = state.table.last("run/wall_s", math.nan)
    done = state.state in ("finished", "stopped")
    times = [duration(wall_s if state.rows else state.now - state.began)]
    times += [] if done or state.time_left_s is None else [time_left(state.time_left_s)]
    line.add_row(f"step {state.step}" + (f"/{total}" if total else ""), bar, ", ".join(times))
    phase = state.phase
    style = "yellow" if phase.startswith("waiting") else "green"
    return Group(line, Text(phase, style=style, no_wrap=True, overflow="ellipsis"))


def numbers(state: ViewState) -> list[Line]:
    """(label, value) lines, the most important first; without those that the run has no values for."""
    lines = [_failures(state), _evaluation(state), _reward(state), _policy(state), _lag(state), _speed(state),
             _groups(state)]
    return [line for line in lines if line is not None]


def _failures(state: ViewState) -> Line | None:
    failed = state.counters.get("num_episodes_failed") or state.table.last("hub/num_episodes_failed", 0.0)
    if not failed:
        return None
    return "failures", Text(f"{compact(failed)} episodes failed in their environment", style="bold red")


def _evaluation(state: ViewState) -> Line | None:
    scores = state.table.values("eval/score")
    if not scores:
        return None
    best = max(range(len(scores)), key=lambda i: (scores[i], -i))
    at = state.table.series("eval/score")[0][best]
    words = f"{compact(scores[0])} → {compact(scores[-1])}" if len(scores) > 1 else compact(scores[0])
    where = f"at step {at}" if at else "before training"
    more = f"  best {compact(scores[best])} at step {at}" if len(scores) > 1 else f"  {where}"
    spark = (f"  {sparkline(scores, 20)}", "green") if len(scores) > 2 else ""
    return "evaluation", Text.assemble(words, more, spark)


def _reward(state: ViewState) -> Line | None:
    rewards = state.table.values("reward/recent") or state.table.values("reward/mean")
    if not rewards:
        return None
    return "reward", Text.assemble(f"{compact(_recent(rewards))}  ", (sparkline(rewards, SPARK_WIDTH), "green"))


def _policy(state: ViewState) -> Line | None:
    """Recent means, since single steps jump."""
    shown = (("loss", "policy/loss"), ("entropy", "entropy/mean"), ("KL", "kl/value"),
             ("gradient", "policy/grad_norm"))
    found = [(name, Rows(state.rows[-NUM_RECENT_STEPS:]).values(key)) for name, key in shown]
    words = [f"{name} {compact(_recent(values), 2)}" for name, values in found if values]
    return ("policy", "  ".join(words)) if words else None


def _lag(state: ViewState) -> Line | None:
    means = state.table.values("lag/token_mean")
    if not means:
        return None
    most = max([0, *state.table.values("lag/head_max")])
    text = Text(f"mean {compact(_recent(means), 2)}  max {compact(most)}")
    if state.max_lag is not None:
        text.append(f"  bound {state.max_lag}", style="bold red" if most > state.max_lag else "")
    sizes = state.table.values("ess/token")
    text.append(f"   effective sample size {compact(_recent(sizes), 2)}" if sizes else "")
    return "lag", text


def _speed(state: ViewState) -> Line | None:
    if not state.rows:
        return None
    train = state.table.values("throughput/train_tokens_per_s")
    generate = state.table.last("throughput/generate_tokens_per_s", math.nan)
    words = f"{compact(_recent(train)) if train else '-'} trained  {compact(generate)} generated"
    if state.wait_share is not None:
        words += f"   learner waits {state.wait_share:.0%} of its time"
    return "tokens/s", words


def _groups(state: ViewState) -> Line | None:
    if not state.rows and not state.actors:
        return None
    leases = state.counters.get("num_leases_open", state.table.last("hub/num_leases_open", math.nan))
    queued = state.counters.get("num_groups_queued", state.table.last("hub/num_groups_queued", math.nan))
    alive = state.counters.get("num_actors", state.table.last("hub/num_actors", len(state.actors)))
    parts = [f"{compact(leases)} being generated" if math.isfinite(leases) else "",
             f"{compact(queued)} wait for training" if math.isfinite(queued) else "",
             f"{compact(alive)} actor{'' if alive == 1 else 's'} connected"]
    return "groups", "  ".join(part for part in parts if part)


def _recent(values: Sequence[float]) -> float:
    recent = values[-NUM_RECENT_STEPS:]
    return sum(recent) / len(recent)


def _grid(lines: Sequence[Line]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in lines:
        table.add_row(label, value)
    return table


def actors(state: ViewState, num_shown: int) -> Table:
    """The first of the actors, and how many more there are."""
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    for name in ("actor", "state", "version", "tokens/s", "last message"):
        table.add_column(name, justify="left" if name in ("actor", "state") else "right", no_wrap=True)
    for actor_id, what, version, tokens_per_s, silent_s in state.actors[:num_shown]:
        cells = (actor_id, what, str(version).rpartition(":")[2], compact(tokens_per_s), f"{duration(silent_s)} ago")
        table.add_row(*cells, style="" if what == "running" else "yellow")
    hidden = len(state.actors) - num_shown
    if hidden > 0:
        table.add_row(f"and {hidden} more", style="dim")
    return table
