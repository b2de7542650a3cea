"""The memory of a program is that of all its processes together: real children, which each stay below the limit."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from envs.sandbox import Limits, SandboxPool
from tests.unit.envs.sandbox.bubblewrap import path_with_bwrap

LIMITS = Limits(timeout_s=40.0, memory_bytes=256 << 20)
GREEDY = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        kept = b"x" * (100 << 20)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
SHARING = """
import os
kept = b"x" * (60 << 20)
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        import time
        time.sleep(0.5)
        os._exit(len(kept) % 7)
    children.append(child)
print(sum(os.waitpid(child, 0)[1] >> 8 for child in children))
"""


@pytest.fixture(scope="module", params=["1", "2"])
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    path = os.environ["PATH"] if request.param == "1" else path_with_bwrap()
    with patch.dict(os.environ, PATH=path), SandboxPool(request.param, num_workers=1, limits=LIMITS) as made:
        yield made


def test_children_that_are_small_alone_and_large_together_are_ended(pool: SandboxPool) -> None:
    outcome = pool.run(GREEDY)[0]
    assert (outcome.status, outcome.exit_status) == ("memory_limit", -9), outcome
    assert pool.run("print('next')")[0].stdout == "next\n"


def test_what_children_share_counts_once(pool: SandboxPool) -> None:
    outcome = pool.run(SHARING)[0]
    assert (outcome.status, outcome.stdout) == ("ok", f"{8 * ((60 << 20) % 7)}\n"), outcome


def test_a_program_may_use_what_it_was_given(pool: SandboxPool) -> None:
    outcome = pool.run("import time\nkept = b'x' * (150 << 20)\ntime.sleep(0.5)\nprint(len(kept))")[0]
    assert (outcome.status, outcome.stdout) == ("ok", f"{150 << 20}\n"), outcome
