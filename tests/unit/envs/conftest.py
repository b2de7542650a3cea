"""One process of each kind grades the answers of all tests here: its imports take longer than what it is asked."""

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest

from envs.rewards.workers import WorkerPool


class SharedPool(WorkerPool):
    """Stays when the task or reward that asked for it goes."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="session", autouse=True)
def shared_pools() -> Iterator[None]:
    made: list[SharedPool] = []

    @cache
    def pool_of(module: str, num_workers: int, limit_s: float) -> SharedPool:
        made.append(SharedPool(module, 1, limit_s))
        return made[-1]

    with patch("envs.rewards.answers.WorkerPool", pool_of), patch("envs.tasks.reasoning.WorkerPool", pool_of):
        yield
    for pool in made:
        pool.end()
