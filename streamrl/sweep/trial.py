"""A job of a cluster, from the inside: one run, which its sweep may interrupt, and which is saved in time."""

from __future__ import annotations

import fcntl
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.metrics.files import text_of
from streamrl.processes import keep_private, process_state
from streamrl.sweep.job import Job, JobProcess

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

INTERRUPTS = "interrupts"
"""In a run's directory: a number that the sweep writes. No signal: it would reach every process of the job."""
POLL_S = 0.5
FREE_S = 120.0
"""A run whose job was killed may take so long to save and to leave its directory."""


class Trial:
    """The function of a job: the run, resumed if it has begun."""

    def __init__(self, job: Job, share: Mapping[str, str]) -> None:
        self.job, self.share = job, share
        self._process: JobProcess | None = None

    def __call__(self) -> int:
        keep_private()
        _wait_until_free(self.job.run_dir / "LOCK")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the child gets this; here Ctrl-C of a terminal is the sweep's
        process = self._process = JobProcess(self.job, self.share, quiet=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        num_passed_on = 0
        try:
            while (code := process.poll()) is None:
                if num_passed_on < _number_in(self.job.run_dir / INTERRUPTS):
                    num_passed_on += 1
                    process.interrupt()
                time.sleep(POLL_S)
        finally:
            process.close()
        return code

    def checkpoint(self) -> DelayedSubmission:
        """Save the run and stop it: submitit calls this on a signal, and has the job queued again with what it gets."""
        from submitit.core.utils import DelayedSubmission

        if (process := self._process) is not None:
            process.interrupt()
            while process_state(process.pid) not in ("", "Z"):  # not `wait`: the signal may have come inside it
                time.sleep(POLL_S)
        return DelayedSubmission(Trial(self.job, self.share))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}


def _number_in(path: Path) -> int:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else 0


def _wait_until_free(lock: Path) -> None:
    """Until no learner of this machine holds the directory of a run, for a while."""
    deadline = time.monotonic() + FREE_S
    with suppress(FileNotFoundError), lock.open("rb+") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(POLL_S)
