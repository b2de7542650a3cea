"""Runs the jobs of a sweep, a few at once, and stops those that the search prunes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamrl.launch import EXIT_INTERRUPTED
from streamrl.metrics.ranking import Objective
from streamrl.metrics.run_record import read_run
from streamrl.metrics.text import compact
from streamrl.sweep.job import Job, JobProcess, JobRun, is_done

POLL_S = 0.2


class Source(Protocol):
    """Jobs one by one, by their numbers: a `Grid`, or a search whose next job follows from the results so far."""

    def next(self) -> tuple[int, tuple[str, ...]] | None:
        """Number of the next job and the words that are its own; None when there are no more."""

    def should_prune(self, number: int, step: int, value: float) -> bool:
        """Whether a job with this value at this step is to be stopped."""

    def report_end(self, number: int, value: float | None, *, pruned: bool) -> None:
        """A job has ended; without a value it has failed."""


class Grid:
    """Every combination once; none is pruned."""

    def __init__(self, combinations: Sequence[tuple[int, tuple[str, ...]]]) -> None:
        self._left = list(combinations)

    def next(self) -> tuple[int, tuple[str, ...]] | None:
        return self._left.pop(0) if self._left else None

    def should_prune(self, number: int, step: int, value: float) -> bool:
        return False

    def report_end(self, number: int, value: float | None, *, pruned: bool) -> None:
        pass


@dataclass(slots=True)
class _Running:
    process: JobRun
    place: int
    began: float


class Pool:
    """A pool of as many concurrent jobs as there are `places`, each with its place's environment variables.

    Args:
        make_job: from the number and the words that `source` gives.
        num_interrupts: how often the user has asked to stop; each job is asked as often.
        on_end: called after each end of a job.
        start: makes the run of a job; without it each is a child of this process.
    """

    def __init__(
        self, source: Source, make_job: Callable[[int, Sequence[str]], Job], objective: Objective,
        places: Sequence[Mapping[str, str]], num_interrupts: Callable[[], int],
        on_end: Callable[[], object] = lambda: None,
        start: Callable[[Job, Mapping[str, str]], JobRun] | None = None,
    ) -> None:
        self._source, self._make_job, self._objective, self._places = source, make_job, objective, places
        self._num_interrupts, self._num_passed_on, self._on_end = num_interrupts, 0, on_end
        self._start, self._poll_s = start or self._child, POLL_S if start is None else 5 * POLL_S
        self._running: list[_Running] = []
        self._best: tuple[float, Job] | None = None
        self._has_more = True

    def run(self) -> None:
        """Until the source has no more jobs, or the user interrupts; no process of a job is left then."""
        try:
            while True:
                self._pass_on_interrupts()
                self._start_jobs()
                for running in list(self._running):
                    self._look_at(running)
                if not self._running and (not self._has_more or self._num_passed_on):
                    return
                time.sleep(self._poll_s)  # the ends of several processes and files are no one event
        finally:
            for running in self._running:
                running.process.interrupt()
            for running in self._running:
                running.process.close()

    def _pass_on_interrupts(self) -> None:
        while self._num_passed_on < self._num_interrupts():
            self._num_passed_on += 1
            for running in self._running:
                running.process.interrupt()

    def _start_jobs(self) -> None:
        taken = {running.place for running in self._running}
        for place in sorted(set(range(len(self._places))) - taken):
            job = self._next_job() if self._has_more and not self._num_passed_on else None
            if job is None:
                self._has_more = self._has_more and bool(self._num_passed_on)
                return
            alone = len(self._places) == 1
            print(f"\n=== job {job.number}: {job.label}" if alone else f"job {job.number} started: {job.label}",
                  flush=True)
            process = self._start(job, self._places[place])
            self._running.append(_Running(process, place, time.monotonic()))

    def _child(self, job: Job, share: Mapping[str, str]) -> JobRun:
        return JobProcess(job, share, quiet=len(self._places) > 1)

    def _next_job(self) -> Job | None:
        """The next one that needs work; those that an earlier part of this sweep has done are counted."""
        while (found := self._source.next()) is not None:
            job = self._make_job(*found)
            if not is_done(job.run_dir):
                return job
            self._count(job)
        return None

    def _look_at(self, running: _Running) -> None:
        process, job = running.process, running.process.job
        code = process.poll()
        for step, value in process.new_values(self._objective):  # of a short run all come once it has ended
            behind = self._source.should_prune(job.number, step, value)  # which records it: others are compared with it
            if behind and code is None and not process.is_pruned:
                print(f"job {job.number} is pruned at step {step}: {compact(value)}", flush=True)
                process.prune(step)
        if code is None:
            return
        process.close()
        self._running.remove(running)
        if code == EXIT_INTERRUPTED and process.is_pruned:
            process.mark_pruned()
            self._source.report_end(job.number, None, pruned=True)
        elif code == 0:
            self._count(job, time.monotonic() - running.began)
        elif not self._num_passed_on:
            print(f"job {job.number} failed: {process.mark_failed(code)}", flush=True)
            self._source.report_end(job.number, None, pruned=False)
        self._on_end()

    def _count(self, job: Job, seconds: float | None = None) -> None:
        """A job that has ended in order."""
        record = read_run(job.run_dir)
        value = self._objective.value(record)
        pruned = record.summary is not None and record.summary.stopped != ""
        self._source.report_end(job.number, value, pruned=pruned)
        if value is not None and not pruned and (self._best is None or self._objective.better(value, self._best[0])):
            self._best = value, job
        best = f"; best so far {compact(self._best[0])} of job {self._best[1].number}" if self._best else ""
        after = "before" if seconds is None else f"after {seconds:.0f} s"
        print(f"job {job.number} finished {after}: {self._objective.metric} {compact(value)}{best}", flush=True)
