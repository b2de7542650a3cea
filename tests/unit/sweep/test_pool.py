"""The pool of a sweep, with stand-ins for the processes of its jobs."""

from __future__ import annotations

from pathlib import Path

from streamrl.metrics.ranking import Objective
from streamrl.sweep import pool
from streamrl.sweep.job import Job


class FakeEndedProcess:
    """A job that has ended, with two evaluations, before anyone looks at it."""

    is_pruned = False

    def __init__(self, job: Job, share: object, *, quiet: bool) -> None:
        self.job = job

    def poll(self) -> int:
        return 1

    def new_values(self, objective: Objective) -> list[tuple[int, float]]:
        return [(10, 5.0), (20, 10.0)]

    def prune(self, step: int) -> None:
        raise AssertionError("it has ended")

    def close(self) -> None:
        pass

    def mark_failed(self, code: int) -> str:
        return "of no reason"


class FakeSource:
    """One job that is behind the others at every step."""

    def __init__(self) -> None:
        self.jobs, self.recorded, self.ends = [(0, ("a=1",))], [], []

    def next(self):
        return self.jobs.pop() if self.jobs else None

    def should_prune(self, number: int, step: int, value: float) -> bool:
        self.recorded.append((number, step, value))
        return True

    def report_end(self, number: int, value: float | None, *, pruned: bool) -> None:
        self.ends.append((number, value, pruned))


def test_the_values_of_a_job_that_ended_between_two_looks_are_recorded(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(pool, "JobProcess", FakeEndedProcess)
    source = FakeSource()
    pool.Pool(source, lambda number, words: Job(number, words, words, tmp_path), Objective(), [{}], lambda: 0).run()

    assert source.recorded == [(0, 10, 5.0), (0, 20, 10.0)] and source.ends == [(0, None, False)]
