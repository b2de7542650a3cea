"""Real worker processes: answers, time limits, deaths."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from envs.rewards.workers import GraderError, WorkerPool
from streamrl.errors import TaskError


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool("envs.rewards.math_worker", num_workers=1, limit_s=5)
    yield made
    made.close()


def test_threads_share_the_workers(pool: WorkerPool) -> None:
    with ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(lambda n: pool.ask(["1/2", f"{n}/4"]), range(4)))
    assert answers == [0.0, 0.0, 1.0, 0.0]
    assert len([worker for worker in pool._places.queue if worker is not None]) == 1


def test_an_endless_comparison_is_ended_and_the_next_one_answered() -> None:
    pool = WorkerPool("envs.rewards.math_worker", num_workers=1, limit_s=0.5)
    assert pool.ask(["1", "1"]) == 1.0
    (worker,) = _workers_of(pool)
    (grader,) = psutil.Process(worker).children()
    with pytest.raises(GraderError, match="longer than 0.5 s"):
        pool.ask(["1", "9^{9^{9^{9}}}"])
    assert not psutil.pid_exists(grader.pid)
    assert pool.ask(["2", "2.0"]) == 1.0
    assert _workers_of(pool) == [worker]
    pool.close()
    assert _workers_of(pool) == []


def test_a_worker_that_dies_is_named_and_replaced(pool: WorkerPool) -> None:
    pool.ask(["1", "1"])
    (worker,) = [worker for worker in pool._places.queue if worker is not None]
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait(10)
    with pytest.raises(TaskError, match="ended with status -9"):
        pool.ask(["1", "1"])
    assert pool.ask(["1", "1"]) == 1.0


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(TaskError, match="No module named"):
        WorkerPool("envs.rewards.no_such_worker", num_workers=1, limit_s=1).ask("x")


def _workers_of(pool: WorkerPool) -> list[int]:
    return [worker._process.pid for worker in pool._places.queue if worker is not None]
