"""Work beside training: one job at a time in a thread of its own, with collectives of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from learner.ranks.mesh import Ranks

T = TypeVar("T")


class Background(Generic[T]):
    """One job at a time; every rank starts the same ones. Making one is a collective call.

    Args:
        name: of the thread.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks = ranks.background_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._job: Future[T] | None = None

    def start(self, work: Callable[[Ranks], T]) -> None:
        """Begin `work`, which gets the ranks for its collectives; the job before must have been taken."""
        assert self._job is None, "take the result of the last job first"
        self._job = self._thread.submit(work, self._ranks)

    @property
    def succeeded(self) -> bool:
        """Whether a result may be taken without a wait, and no error: that is for a moment when all ranks take it."""
        return self._job is not None and self._job.done() and self._job.exception() is None

    def take(self) -> T:
        """Wait for the job; what it returned or raised."""
        assert self._job is not None, "no job was started"
        job, self._job = self._job, None
        return job.result()

    def close(self) -> None:
        """Start nothing more; a job that runs is left alone."""
        self._thread.shutdown(wait=False, cancel_futures=True)
