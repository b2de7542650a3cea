"""One supervised process and its log."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamrl.config.schema import Config
from streamrl.messages.printable import printable_lines
from streamrl.metrics.files import text_of
from streamrl.processes import Child, is_stopped, num_cores, processor_s

OWN_LINE = re.compile(r"\d\d:\d\d:\d\d (learner|hub|actor|launch)")
"""A line of ours in a log."""
LAUNCHER_LINE = re.compile(r"torch.distributed|torchrun|ChildFailedError")
"""torchrun ends with a traceback of its own, about its children."""
SPINS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how long threads of OpenMP spin while they wait for each other."""


def num_threads(config: Config) -> int:
    """Threads that the processes of a run on this machine compute with."""
    launch, cores = config.launch, num_cores()  # 0 is torch's own choice
    return (launch.num_learner_ranks * (config.run.num_threads or cores)
            + launch.num_actors * (config.actors.num_threads or cores))


def openmp_environment(num_threads: int, num_cores: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of children besides `environment`, which wins: with more threads than cores none may spin at a barrier.

    A thread that spins there holds the core that the thread it waits for needs.
    """
    if num_threads <= num_cores or any(name in environment for name in SPINS):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


class Supervised(Child):
    """A process of a run, with `logs/<name>.log` for its output and `more` in its environment."""

    def __init__(self, name: str, command: Sequence[str], run_dir: Path, more: Mapping[str, str] | None = None) -> None:
        self.name, self.log_path, self.started_at = name, run_dir / "logs" / f"{name}.log", time.monotonic()
        self.num_restarts = self.same_deaths = 0
        self.last_line, self.given_up = "", False
        self.restart_at: float | None = None
        self.log_path.parent.mkdir(exist_ok=True)
        super().__init__(command, log=self.log_path, environment={**os.environ, **(more or {})})

    def sentence(self, now: float) -> str:
        """Describe the process without asking it; `now` in monotonic seconds."""
        stopped = " and is stopped (SIGSTOP)" if is_stopped(self.pid) else ""
        return (f"has run for {now - self.started_at:.0f} s as process {self.pid}{stopped}, with "
                f"{processor_s(self.pid):.0f} s of processor time (see {self.log_path})")


def log_tail(path: Path, num_lines: int) -> str:
    """Return the end of a log without the lines of steps, indented."""
    lines = [line for line in _lines(path) if not line.startswith("step ")]  # the terminal has had those
    return "\n".join("  " + line for line in lines[-num_lines:])


def last_words(path: Path) -> str:
    """Return the end of a log without what libraries print, unless it ends with a traceback."""
    lines = _lines(path)
    own = [line for line in lines if OWN_LINE.match(line)]
    after = lines[lines.index(own[-1]):] if own else lines
    if not own or any(line.startswith("Traceback") for line in after) and not any(map(LAUNCHER_LINE.search, after)):
        return log_tail(path, 20)
    return "\n".join("  " + line for line in own[-6:])


def _lines(path: Path) -> list[str]:
    """The lines of a log, without empty ones; a task may print anything."""
    return [printable_lines(line) for line in text_of(path).splitlines() if line.strip()]
