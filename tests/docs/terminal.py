"""Commands run as in terminals: one after the other, or several side by side until their learner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LEAVE_S = 60.0
"""How long actors have to end after their learner has."""

TAIL = 25
NOT_LEARNED = 75
"""The status of a command that ended well and whose run did not end above its start."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One command: its exit status and seconds, or why it was not run."""

    where: str
    command: str
    status: int | None = None
    seconds: float = 0.0
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0)

    def with_scores(self, runs: Sequence[tuple[Mapping[str, Any], Sequence[str]]], *, must_rise: bool) -> Outcome:
        """The same with the first and the last score of the runs that it made: failed where one did not rise but must.

        Args:
            runs: summary and answers of each. All answers blank is a failure whatever the scores.
        """
        if self.failed or self.status is None:
            return self
        scores = [(one.get("eval_score_first"), one.get("eval_score_last")) for one, _ in runs]
        told = ", ".join(f"{first} -> {last}" for first, last in scores) or "no run"
        if any(answers and not any(answer.strip() for answer in answers) for _, answers in runs):
            return replace(self, status=NOT_LEARNED, note=f"evaluation {told}; every answer is blank")
        rose = bool(scores) and all(None not in pair and pair[1] > pair[0] for pair in scores)
        status = self.status if rose or not must_rise else NOT_LEARNED
        return replace(self, status=status, note="; ".join(part for part in (self.note, f"evaluation {told}") if part))

    @property
    def line(self) -> int:
        return int(self.where.rpartition(":")[2])

    def row(self) -> str:
        status = "-" if self.status is None else "timeout" if self.status == -signal.SIGKILL else str(self.status)
        seconds = f"{self.seconds:7.1f}" if self.status is not None else "      -"
        command = self.command.strip().partition("\n")
        shown = command[0] + (" [...]" if command[2] else "")
        return f"{status:>7} {seconds}  {shown}\n{'':17}{self.where}{'; ' + self.note if self.note else ''}"


@dataclass(slots=True)
class _Running:
    where: str
    command: str
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    deadline: float

    def wait(self, deadline: float) -> Outcome:
        """Its end; killed with its process group at the deadline."""
        try:
            status = self.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            status = self.kill()
        outcome = Outcome(self.where, self.command, status, time.monotonic() - self.started)
        print(f"    {outcome.status} after {outcome.seconds:.1f} s", flush=True)
        if outcome.failed:
            lines = self.log.read_text(errors="replace").splitlines()[-TAIL:]
            print("\n".join(f"    | {line}" for line in lines), flush=True)
        return outcome

    def kill(self) -> int:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Terminals:
    """Starts commands in one folder; each has a process group of its own and a log."""

    def __init__(self, folder: Path, logs: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._logs = logs
        self._environment = environment
        self._open: list[_Running] = []
        self._count = 0

    def run(self, where: str, command: str, timeout_s: float, python: bool = False) -> Outcome:
        """One command to its end; with `python`, a script."""
        running = self._start(where, command, timeout_s, python)
        self._open.append(running)
        outcome = running.wait(running.deadline)
        self._open.remove(running)
        return outcome

    def open(self, where: str, command: str, timeout_s: float) -> None:
        """One more terminal, beside those that are open."""
        self._open.append(self._start(where, command, timeout_s, python=False))

    def finish(self) -> list[Outcome]:
        """Wait for the first terminal, the learner's; the others then have to end by themselves."""
        outcomes: list[Outcome] = []
        for running in self._open:
            deadline = running.deadline if not outcomes else time.monotonic() + LEAVE_S
            outcomes.append(running.wait(deadline))
        self._open = []
        return outcomes

    def close(self) -> None:
        """Kill what still runs."""
        for running in self._open:
            running.kill()

    def _start(self, where: str, command: str, timeout_s: float, python: bool) -> _Running:
        print(f"{where}\n    {command.strip().replace(chr(10), chr(10) + '    ')}", flush=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._count += 1
        log = self._logs / f"{self._count:03d}.log"
        words = ["bash", "-c", command]
        if python:  # a file, as a reader's: functions are read from their source
            script = log.with_suffix(".py")
            script.write_text(command, encoding="utf-8")
            words = ["python", str(script)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )
        now = time.monotonic()
        return _Running(where, command, process, log, now, now + timeout_s)
