"""One supervised process and its log."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.schema import Config
from streamrl.messages.printable import printable_lines
from streamrl.metrics.files import private, text_of
from streamrl.parent_watch import child_environment
from streamrl.processes import is_stopped, num_cores, processor_s

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


@dataclass(slots=True)
class Child:
    """A process with the read end of a pipe from this one as its standard input."""

    name: str
    process: subprocess.Popen[bytes]
    started_at: float
    log_path: Path
    num_restarts: int = 0
    same_deaths: int = 0
    last_line: str = ""
    restart_at: float | None = None
    given_up: bool = False

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], run_dir: Path, more: Mapping[str, str] | None = None
    ) -> Child:
        """Start it in a session of its own, with `logs/<name>.log` for its output and `more` in its environment."""
        log_path = run_dir / "logs" / f"{name}.log"
        log_path.parent.mkdir(exist_ok=True)
        with open(log_path, "ab", opener=private) as output:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                env={**child_environment(), **(more or {})}, start_new_session=True,
            )
        return cls(name, process, time.monotonic(), log_path)

    def tail(self, num_lines: int) -> str:
        """The end of its log without the lines of steps, indented."""
        lines = [line for line in self._lines() if not line.startswith("step ")]  # the terminal has had those
        return "\n".join("  " + line for line in lines[-num_lines:])

    def last_words(self) -> str:
        """The end of its log without what libraries print, unless it ends with a traceback."""
        lines = self._lines()
        own = [line for line in lines if OWN_LINE.match(line)]
        after = lines[lines.index(own[-1]):] if own else lines
        if not own or any(line.startswith("Traceback") for line in after) and not any(map(LAUNCHER_LINE.search, after)):
            return self.tail(20)
        return "\n".join("  " + line for line in own[-6:])

    def sentence(self, now: float) -> str:
        """Describe the process without asking it; `now` in monotonic seconds."""
        pid = self.process.pid
        stopped = " and is stopped (SIGSTOP)" if is_stopped(pid) else ""
        return (f"runs for {now - self.started_at:.0f} s as process {pid}{stopped}, with {processor_s(pid):.0f} s of "
                f"processor time (see {self.log_path})")

    def _lines(self) -> list[str]:
        """The lines of its log, without empty ones; a task may print anything."""
        text = text_of(self.log_path)
        return [printable_lines(line) for line in text.splitlines() if line.strip()]

    def close_pipe(self) -> None:
        """A child that still runs ends by this: it watches the other end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
