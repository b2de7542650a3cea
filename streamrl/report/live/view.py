"""Live display of `launch`, from `metrics.jsonl`, `status.json` and the logs of the run directory.

On a terminal it is a panel that is drawn again and again. Without one it is plain lines: what the processes say while
they start and whenever something happens, one for each step, and one now and then if nothing else comes.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from os.path import samestat
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from streamrl.messages.printable import printable
from streamrl.metrics.files import read_object
from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.sinks import parse_row, plain_line
from streamrl.metrics.text import duration
from streamrl.report import headline
from streamrl.report.live.panel import ViewState, render

STEP_LINE_S = 1.0
"""Plain lines of steps are never closer together; the log has them all."""
NUM_SAID = 256
QUIET_S = 15.0
"""Before the first step, plain lines are never farther apart."""


class LiveView:
    """Display of one run directory, which need not exist yet; `console` None is standard error, in a notebook too."""

    def __init__(self, run_dir: str | os.PathLike[str], console: Console | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.root = Path(run_dir)
        self.state = ViewState(name=self.root.resolve().name)
        self._console = console if console is not None else Console(stderr=True, force_jupyter=False)
        self._clock = clock
        self._metrics, self._logs = Tail(self.root / "metrics.jsonl"), LogReader(self.root)
        self._shown: dict[int, int] = {}
        self._held: list[Mapping[str, Any]] = []  # steps without a line yet
        self._step_at = -math.inf
        self._read_status()
        self._noticed = set(self.state.notices)  # of the part of the run before a resume
        # A notice is also a line of the hub's log, and either may be read first.
        self._said: deque[str] = deque(maxlen=NUM_SAID)
        self._printed_at = self.state.began = self.state.now = clock()

    def run(self, until: threading.Event, poll_s: float = 0.5) -> None:
        """Draw until `until` is set, then once more for the last step."""
        if not self._console.is_terminal:
            while not until.wait(poll_s):
                self.print_news()
            self.print_news(ended=True)
            return
        with Live(self._picture(), console=self._console, auto_refresh=False) as live:
            ended = False
            while not ended:
                ended = until.wait(poll_s)
                self.poll()
                self._print_notices()  # above the display, where they stay
                live.update(self._picture(), refresh=True)

    def _picture(self) -> Any:
        return render(self.state, self._console.size.height - 1, self._console.size.width)

    def poll(self) -> tuple[list[Mapping[str, Any]], list[str]]:
        """Read what is new into `state`; returns the new metrics rows and the new lines of logs."""
        self.state.now = self._clock()
        fresh = []
        for line in self._metrics.lines():
            try:
                row = parse_row(line)
            except ValueError:  # damaged; readers of the whole file name it
                continue
            if self._shown.get(row["step"]) != hash(line):  # a resume rewrites the file: skip its old lines
                self._shown[row["step"]] = hash(line)
                self.state.update(row)
                fresh.append(row)
        self._read_status()
        told = tuple(notice.partition(" ")[2] for notice in self.state.notices)
        news = [line for line in self._logs.news() if not line.endswith(told)]
        for line in news:
            self.state.log(line)
        if not self.state.about:
            self.state.about = about(self.root)
        return fresh, news

    def _read_status(self) -> None:
        status = self.root / "status.json"
        if status.exists():
            self.state.update(read_object(status))

    def _print_notices(self) -> None:
        for notice in self.state.notices:
            if notice not in self._noticed:
                self._noticed.add(notice)
                if notice.partition(" ")[2] not in self._said:
                    self._print(notice, "yellow")

    def print_news(self, *, ended: bool = False) -> None:
        """Plain lines of what happened since the last call, steps last: of these one a second and every evaluation."""
        rows, news = self.poll()
        for line in news:
            self._print(line)
            self._said.append(line.split(maxsplit=2)[-1])
        self._print_notices()
        self._held += rows
        due = ended or self._clock() - self._step_at >= STEP_LINE_S
        for row in [row for row in self._held if "eval/score" in row or (due and row is self._held[-1])]:
            self._step_at = self._clock()
            self._print(plain_line(row, self.state.total_steps or None, self.state.time_left_s))
            self._held = self._held[self._held.index(row) + 1 :]
        quiet_s = self._clock() - self._printed_at
        if quiet_s > QUIET_S and not self.state.rows:
            doing = first_batch(self.state)
            passed = duration(self._clock() - self.state.began)
            self._print(f"{time.strftime('%H:%M:%S')} {doing} ({passed} since the start)")

    def _print(self, line: str, style: str = "") -> None:
        self._printed_at = self._clock()
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def first_batch(state: ViewState) -> str:
    """Describe the activity of a run before its first step."""
    if state.waiting_for:
        return f"waiting: {state.waiting_for}"
    return f"the learner {state.learner}" if state.learner else "still starting"


def about(root: Path) -> str:
    """Task and model of a run in words; "" before its learner has written the configuration."""
    record = RunRecord([], name=root.name, config=read_object(root / "config.json"))
    return ", ".join(part for part in (headline.task(record), headline.model(record)) if part)


# --- the files of a run as they grow ----------------------------------------------------------------------------------


LOG_LINE = re.compile(r"\d\d:\d\d:\d\d \w+ +\S")
"""How our own processes begin a line. Progress bars of libraries and the rest of a traceback do not."""
ROUTINE = (
    "installed version", "connecting to", "joined run", "hub listens at", "working:", "exiting:", "stopped by the hub",
    "report: ", "environment failure", "the next version waits for",
)
"""Lines of every healthy run that the display says better itself."""


class Tail:
    """New whole lines of a growing file, which may not exist yet and may be replaced by another."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, -1

    def skip(self) -> None:
        """Leave out what is there now."""
        self.lines()

    def lines(self) -> list[str]:
        """The lines added since the last call; all of them again after the file was replaced or cut."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._offset, self._inode = 0, stat.st_ino
                file.seek(self._offset)
                fresh = file.read()
        except OSError:  # not there yet, or not to be read
            return []
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()


LAUNCH_LOG = "launch.log"
"""The log of a sweep's run that holds what its launcher says, and so every line of this display."""


class LogReader:
    """The logs of a run's processes; those that are there at the start are of an earlier part, and skipped.

    A file that gets what this display prints is not read: every line would be told again, without end.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tails: dict[Path, Tail] = {}
        for path in self._paths():
            self._tail(path).skip()

    def news(self) -> list[str]:
        """New lines worth reading, in the order of the files; an actor's with its name, which is its file's."""
        return [
            printable(line if path.stem == "learner" else line.replace(" actor  ", f" {path.stem}", 1))
            for path in self._paths() for line in self._tail(path).lines() if worth_reading(line)
        ]

    def _tail(self, path: Path) -> Tail:
        return self._tails.setdefault(path, Tail(path))

    def _paths(self) -> Iterable[Path]:
        learner_first = sorted(self._root.glob("logs/*.log"), key=lambda path: (path.stem != "learner", path.stem))
        return [path for path in (*sorted(self._root.glob("*.log")), *learner_first) if not _is_ours(path)]


def _is_ours(path: Path) -> bool:
    """Whether this process's output goes there: by its name of a sweep, or as its user has directed it."""
    with suppress(OSError):
        return path.name == LAUNCH_LOG or any(samestat(path.stat(), os.fstat(stream)) for stream in (1, 2))
    return False


def worth_reading(line: str) -> bool:
    """Neither routine nor what a library prints; steps have a line of their own."""
    return LOG_LINE.match(line) is not None and not any(words in line for words in ROUTINE)
