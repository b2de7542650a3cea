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
        pool.ask(["0.5", r"\int_0^1 e^{x^2}\sin(x^3) dx"])
    assert not psutil.pid_exists(grader.pid)
    assert pool.ask(["2", "2.0"]) == 1.0
    assert _workers_of(pool) == [worker]
    pool.close()
    assert _workers_of(pool) == []


def test_a_worker_that_dies_is_named_and_replaced(pool: WorkerPool) -> None:
    pool.ask(["1", "1"])
    (worker,) = [worker for worker in pool._places.queue if worker is not None]
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait(10)
    with pytest.raises(TaskError, match="ended with status -9"):
        pool.ask(["1", "1"])
    assert pool.ask(["1", "1"]) == 1.0


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(TaskError, match="No module named"):
        WorkerPool("envs.rewards.no_such_worker", num_workers=1, limit_s=1).ask("x")


@pytest.mark.parametrize(("does", "says"), [
    ("print('no JSON', flush=True)", "printed a line that is not an answer.*: b'no JSON'"),
    ("print(5, flush=True)", "printed a line that is not an answer.*: b'5'"),
    ("os.close(1)", "ended with status -9"),
    ("", "did not answer in time"),
])
def test_a_worker_that_does_not_keep_to_its_part_blocks_no_caller(monkeypatch, tmp_path, does, says) -> None:
    read = "sys.stdin.readline()" if does else ""
    program = f"import os, sys, time\nprint('ready', flush=True)\n{read}\n{does}\ntime.sleep(1000)\n"
    (tmp_path / "odd_worker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for name in ("PREPARE_S", "GRACE_S", "END_S"):
        monkeypatch.setattr(f"envs.rewards.workers.{name}", 0.5)
    pool = WorkerPool("odd_worker", num_workers=1, limit_s=10.0 if does else 0.0)
    with pytest.raises(TaskError, match=says):
        pool.ask("x" * (1 << 20))
    children = psutil.Process().children()
    assert not any("odd_worker" in child.cmdline() for child in children if child.status() != psutil.STATUS_ZOMBIE)


def _workers_of(pool: WorkerPool) -> list[int]:
    return [worker.process.pid for worker in pool._places.queue if worker is not None]
