"""One run of a sweep: its settings, and the process that executes it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from streamrl.errors import CheckpointError
from streamrl.metrics.files import read_object, text_of, write_atomic
from streamrl.metrics.ranking import Objective, pruned_at
from streamrl.metrics.run_record import FAILURE
from streamrl.metrics.sinks import parse_row
from streamrl.metrics.summary import Summary
from streamrl.parent_watch import program
from streamrl.processes import Child
from streamrl.report.live.view import LAUNCH_LOG, Tail
from streamrl.report.report import write_report
from streamrl.run_dirs import LAUNCH_LOCK, is_held

SUBDIR, NUM, MAX_NAME = "{num}-{overrides}", "{num}", 120
ERRORS_S = 5.0
"""For the last errors of a run that has ended; what it left running may hold their pipe open."""


@dataclass(frozen=True)
class Job:
    """`words` are all that `streamrl launch` gets for this run, `swept` those of them that the sweep varies."""

    number: int
    words: tuple[str, ...]
    swept: tuple[str, ...]
    run_dir: Path

    @property
    def label(self) -> str:
        return " ".join(self.swept) or "defaults"


def make_job(directory: Path, fixed: Sequence[str], subdir: str | None, number: int, swept: Sequence[str]) -> Job:
    """The job of a sweep in `directory`; its own directory there is named by its number and by what is swept."""
    form, whole = subdir or SUBDIR, "_".join(map(_rounded, swept))
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", whole).strip("-")[:MAX_NAME] or "defaults"
    plain = all(re.fullmatch(r"[A-Za-z0-9.-]*", word.partition("=")[2]) for word in swept)
    if NUM not in form and not (plain and whole == "_".join(swept) and len(whole) <= MAX_NAME):
        name += f"-{xxhash.xxh3_64_hexdigest(repr(swept).encode())[:8]}"  # else two jobs could have one directory
    run_dir = directory / form.replace(NUM, str(number)).replace("{overrides}", name)
    own = ("sweep.", "run.dir=", "checkpoint.resume=")
    words = (*(word for word in numbered(fixed, number) if not word.startswith(own)), *swept)
    return Job(number, words, tuple(swept), run_dir)


def number_in(name: str, subdir: str | None) -> int:
    """The number in the name of a job's directory; 0 in any other."""
    form = re.escape(subdir or SUBDIR).replace(re.escape(NUM), r"(\d+)").replace(re.escape("{overrides}"), ".*")
    found = re.fullmatch(form, name)
    return int(found[1]) if found and NUM in (subdir or SUBDIR) else 0


def numbered(words: Sequence[str], number: int) -> list[str]:
    """The words of a job, in which ${hydra.job.num} is its number."""
    return [word.replace("${hydra.job.num}", str(number)) for word in words]


def _rounded(word: str) -> str:
    """A drawn number has too many digits for the name of a directory."""
    key, _, value = word.partition("=")
    return f"{key}={float(value):.4g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?|-?\d+e-?\d+", value) else word


def is_done(run_dir: Path) -> bool:
    """Whether this run needs no more work: it did all of its steps, or it was pruned."""
    try:
        summary = Summary.load(run_dir / "summary.json")
    except CheckpointError:  # none, or one that tells nothing
        return False
    return not summary.failed and (not summary.stopped or summary.stopped.startswith("pruned"))


class JobRun:
    """A run of a job while it goes on, and what is written into its directory about it, wherever it is executed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        job.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (job.run_dir / FAILURE).unlink(missing_ok=True)
        words = "".join(f"- {json.dumps(word, ensure_ascii=False)}\n" for word in job.swept)
        write_atomic(job.run_dir / "overrides.yaml", words)
        self.log_path = job.run_dir / "logs" / LAUNCH_LOG
        self.log_path.parent.mkdir(exist_ok=True)
        self.reason = ""  # of its failure, where no file of the run has it
        self._metrics = Tail(job.run_dir / "metrics.jsonl")
        self._pruned_at: int | None = None

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Interrupt as Ctrl-C does: the first time it saves and stops, the second time it ends at once."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for its end."""
        raise NotImplementedError

    def new_values(self, objective: Objective) -> list[tuple[int, float]]:
        """(step, value) of the lines that metrics.jsonl got since the last call."""
        rows = []
        for line in self._metrics.lines():
            with suppress(ValueError):  # a damaged line; the ranking at the end names it
                rows.append(parse_row(line))
        return objective.intermediate(rows)

    def prune(self, step: int) -> None:
        """Stop the run, because others did better at `step`."""
        self._pruned_at = step
        self.interrupt()

    @property
    def is_pruned(self) -> bool:
        return self._pruned_at is not None

    def mark_pruned(self) -> None:
        """Write into its summary that it was pruned, and when."""
        path = self.job.run_dir / "summary.json"
        with suppress(CheckpointError):  # there is none
            if self._pruned_at is not None:
                replace(Summary.load(path), stopped=pruned_at(self._pruned_at)).write(path)
                write_report(self.job.run_dir)

    def mark_failed(self, code: int) -> str:
        """Return why it failed in one line, written into its directory unless somebody else does the run there."""
        cause = str(read_object(self.job.run_dir / "summary.json").get("failed", ""))
        log = self.job.run_dir / "logs" / "learner.log"
        reason = self.reason or cause or _last_line(self.log_path) or _last_line(log)
        text = f"status {code}{': ' if reason else ''}{reason}"
        if not is_held(self.job.run_dir / LAUNCH_LOCK):
            (self.job.run_dir / FAILURE).write_text(text + "\n")
        return text


class JobProcess(JobRun):
    """A `streamrl launch` of one job as a child of this process: Ctrl-C reaches it only through `interrupt`."""

    def __init__(self, job: Job, share: Mapping[str, str], *, quiet: bool) -> None:
        super().__init__(job)
        resume = ["checkpoint.resume=true"] if (job.run_dir / "EPOCH").exists() else []
        command = [*program("streamrl.cli"), "launch", *job.words, f"run.dir={job.run_dir}", *resume]
        self._child = Child(
            command, log=self.log_path if quiet else None, environment={**os.environ, **share},
            on_error=None if quiet else self._pass_on_error,
        )
        self.pid = self._child.pid

    def _pass_on_error(self, line: str) -> None:
        """Copy a line of the run's errors to the terminal, and to the log for the reason of a failure."""
        with suppress(OSError):  # a closed terminal or a full disk: the run would wait for who reads no more
            sys.stderr.write(line)
        with suppress(OSError), self.log_path.open("a") as log:
            log.write(line)

    def poll(self) -> int | None:
        return self._child.poll()

    def interrupt(self) -> None:
        if self.poll() is None:
            self._child.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self._child.close_input()  # its end comes soon after that
        self._child.process.wait()
        self._child.errors(ERRORS_S)  # all of them are in the log


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in text_of(path).splitlines() if line.strip()]
    if lines[-2:-1] and lines[-2].startswith("Resume from its newest checkpoint"):  # how to resume is no reason
        lines = lines[:-2]
    return lines[-1] if lines else ""
