"""Live display of `launch`, from `metrics.jsonl`, `status.json` and the logs of the run directory.

`ViewState` is pure: dicts in, a picture out. Without a terminal the same files become plain lines.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.metrics.run_record import parse_row
from streamrl.metrics.sinks import plain_line
from streamrl.metrics.summary import last, series
from streamrl.metrics.text import compact, duration, sparkline

NUM_LOG_LINES = 6
NUM_ACTOR_ROWS = 12
NUM_RECENT_STEPS = 20
"""Steps over which rates and the time left are averaged."""


@dataclass(slots=True)
class ViewState:
    """The state of the display. `update` takes a line of `metrics.jsonl` or the whole of `status.json`.

    Attributes:
        actors: (id, state, version, tokens per second, seconds since its last message) of each.
        waiting_for: what the hub waits for, in words; empty if it does not wait.
        total_steps: 0 while unknown.
    """

    name: str = ""
    state: str = "starting"
    total_steps: int = 0
    max_lag: int | None = None
    waiting_for: str = ""
    actors: list[Sequence[Any]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def update(self, news: Mapping[str, Any]) -> None:
        """An object with `step` is a metrics line, anything else is a status."""
        if "step" not in news:
            for name in ("state", "total_steps", "max_lag", "waiting_for", "actors", "counters", "notices"):
                if name in news:
                    setattr(self, name, news[name])
            return
        # A resumed run repeats the steps after its checkpoint: their old rows are void.
        while self.rows and self.rows[-1]["step"] >= news["step"]:
            self.rows.pop()
        self.rows.append(news)

    def log(self, line: str) -> None:
        """Keep a line of a process's log."""
        self.log_lines = [*self.log_lines, line][-NUM_LOG_LINES:]

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def time_left_s(self) -> float | None:
        """Steps left times the mean time of recent ones; None until two steps are known."""
        recent = [row for row in self.rows[-NUM_RECENT_STEPS - 1 :] if "run/wall_s" in row]
        if len(recent) < 2 or recent[-1]["step"] == recent[0]["step"] or not self.total_steps:
            return None
        per_step = (recent[-1]["run/wall_s"] - recent[0]["run/wall_s"]) / (recent[-1]["step"] - recent[0]["step"])
        return per_step * max(0, self.total_steps - self.step)

    @property
    def wait_share(self) -> float | None:
        """Share of recent time that the learner waited for a batch."""
        recent = self.rows[-NUM_RECENT_STEPS:]
        step_s = sum(series(recent, "time/step_s")[1])
        return sum(series(recent, "time/wait_s")[1]) / step_s if step_s else None

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress(), self._numbers()]
        if self.actors:
            parts.append(self._actors())
        if self.log_lines:
            parts.append(Text("\n".join(self.log_lines), style="dim", no_wrap=True, overflow="ellipsis"))
        title = Text.assemble(("streamrl", "bold"), " ", self.name)
        return Panel(Group(*parts), title=title, title_align="left", border_style="cyan")

    def _progress(self) -> RenderableType:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        total = self.total_steps
        bar = ProgressBar(total=total, completed=min(self.step, total)) if total else ""
        line.add_row(f"step {self.step}" + (f"/{total}" if total else ""), bar, f"{duration(self.time_left_s)} left")
        status = self.state + (f": waits for {self.waiting_for}" if self.waiting_for else "")
        style = "yellow" if self.waiting_for else "green"
        return Group(line, Text(status, style=style, no_wrap=True, overflow="ellipsis"))

    def _numbers(self) -> RenderableType:
        rows = self.rows
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        rewards = series(rows, "reward/mean")[1]
        if rewards:
            table.add_row("reward", Text.assemble(f"{compact(rewards[-1])}  ", (sparkline(rewards), "green")))
        scores = series(rows, "eval/score")[1]
        if scores:
            table.add_row("evaluation", f"first {compact(scores[0])}  last {compact(scores[-1])}  "
                                        f"best {compact(max(scores))}")
        if rows:
            table.add_row("lag", self._lag())
        train = last(rows, "throughput/train_tokens_per_s", float("nan"))
        generate = last(rows, "throughput/generate_tokens_per_s", float("nan"))
        table.add_row("tokens/s", f"{compact(train)} trained  {compact(generate)} generated")
        if self.wait_share is not None:
            table.add_row("learner waits", f"{self.wait_share:.0%} of its time")
        queue = last(rows, "hub/num_groups_queued", self.counters.get("num_groups_queued", float("nan")))
        leases = last(rows, "hub/num_leases_open", self.counters.get("num_leases_open", float("nan")))
        table.add_row("groups", f"{compact(queue)} queued  {compact(leases)} leased")
        alive = self.counters.get("num_actors", last(rows, "hub/num_actors", len(self.actors)))
        table.add_row("actors", f"{compact(alive)} alive")
        if failed := self.counters.get("num_episodes_failed"):
            table.add_row("failures", Text(f"{compact(failed)} episodes failed in their environment", style="bold red"))
        return table

    def _lag(self) -> Text:
        mean = last(self.rows, "lag/token_mean", float("nan"))
        most = max([0, *series(self.rows, "lag/head_max")[1]])
        text = Text(f"mean {compact(mean, 2)}  max {compact(most)}")
        if self.max_lag is not None:
            text.append(f"  bound {self.max_lag}", style="bold red" if most > self.max_lag else "")
        return text

    def _actors(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("actor", "state", "version", "tokens/s", "last message"):
            table.add_column(name, justify="left" if name in ("actor", "state") else "right", no_wrap=True)
        for actor_id, state, version, tokens_per_s, silent_s in self.actors[:NUM_ACTOR_ROWS]:
            style = "" if state == "running" else "yellow"
            cells = (actor_id, state, str(version), compact(tokens_per_s), f"{duration(silent_s)} ago")
            table.add_row(*cells, style=style)
        hidden = len(self.actors) - NUM_ACTOR_ROWS
        if hidden > 0:
            table.add_row(f"and {hidden} more", style="dim")
        return table


class Tail:
    """New whole lines of a growing file, which may not exist yet and may be replaced by another."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, -1

    def lines(self) -> list[str]:
        """What was added since the last call; all of it again after the file was replaced or cut."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._offset, self._inode = 0, stat.st_ino
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            return []
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()


class LiveView:
    """Display of one run directory, which need not exist yet; `console` None is standard error, in a notebook too."""

    def __init__(self, run_dir: str | os.PathLike[str], console: Console | None = None) -> None:
        self.root = Path(run_dir)
        self.state = ViewState(name=self.root.resolve().name)
        self._console = console if console is not None else Console(stderr=True, force_jupyter=False)
        self._metrics = Tail(self.root / "metrics.jsonl")
        self._logs: dict[Path, Tail] = {}
        self._shown: dict[int, int] = {}
        self._read_status()
        self._noticed = set(self.state.notices)  # of the part of the run before a resume

    def run(self, until: threading.Event, poll_s: float = 0.5) -> None:
        """Draw until `until` is set, then once more for the last step."""
        if not self._console.is_terminal:
            while not until.wait(poll_s):
                self.print_news()
            self.print_news()
            return
        with Live(self.state.render(), console=self._console, auto_refresh=False) as live:
            ended = False
            while not ended:
                ended = until.wait(poll_s)
                self.poll()
                self._print_notices()  # above the display, where they stay
                live.update(self.state.render(), refresh=True)

    def poll(self) -> list[Mapping[str, Any]]:
        """Read what is new into `state`; returns the new metrics rows."""
        fresh = []
        for line in self._metrics.lines():
            row = parse_row(line)
            if self._shown.get(row["step"]) != hash(line):  # a resume rewrites the file: skip its old lines
                self._shown[row["step"]] = hash(line)
                self.state.update(row)
                fresh.append(row)
        self._read_status()
        for path in sorted([*self.root.glob("*.log"), *self.root.glob("logs/*.log")]):
            for line in self._logs.setdefault(path, Tail(path)).lines():
                self.state.log(f"{path.stem}: {line}")
        return fresh

    def _read_status(self) -> None:
        status = self.root / "status.json"
        if status.exists():
            self.state.update(json.loads(status.read_text(encoding="utf-8")))

    def _print_notices(self) -> None:
        for notice in self.state.notices:
            if notice not in self._noticed:
                self._noticed.add(notice)
                self._console.print(notice, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def print_news(self) -> None:
        """One plain line for each step since the last call, after what the hub has to say."""
        rows = self.poll()
        self._print_notices()
        for row in rows:
            line = plain_line(row, self.state.total_steps or None, self.state.time_left_s)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
