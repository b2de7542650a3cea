"""Where the jobs of a sweep come from: a list made beforehand, or a search that learns from each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from streamrl.sweep.job import Job, make_job
from streamrl.sweep.study import Search


class Source(Protocol):
    """Jobs one by one; the results reported so far may decide which one follows."""

    def next(self) -> Job | None:
        """The next job; None when there are no more."""

    def should_prune(self, job: Job, step: int, value: float) -> bool:
        """Whether a job with this value at this step is to be stopped."""

    def tell(self, job: Job, value: float | None, *, pruned: bool) -> None:
        """A job has ended; without a value it has failed."""


class Grid:
    """Every combination once; none is pruned."""

    def __init__(self, combinations: Sequence[Sequence[str]], fixed: Sequence[str], directory: Path) -> None:
        self._jobs = [make_job(number, fixed, swept, directory) for number, swept in enumerate(combinations)]

    def next(self) -> Job | None:
        return self._jobs.pop(0) if self._jobs else None

    def should_prune(self, job: Job, step: int, value: float) -> bool:
        return False

    def tell(self, job: Job, value: float | None, *, pruned: bool) -> None:
        pass


class Trials:
    """The trials of a search."""

    def __init__(self, search: Search, fixed: Sequence[str], directory: Path) -> None:
        self._search, self._fixed, self._directory = search, fixed, directory

    def next(self) -> Job | None:
        trial = self._search.next()
        return None if trial is None else make_job(trial[0], self._fixed, trial[1], self._directory)

    def should_prune(self, job: Job, step: int, value: float) -> bool:
        return self._search.should_prune(job.number, step, value)

    def tell(self, job: Job, value: float | None, *, pruned: bool) -> None:
        self._search.tell(job.number, value, pruned=pruned)
