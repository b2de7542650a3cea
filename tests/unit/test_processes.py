"""What /proc tells of other processes, and the end of those that were stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from streamrl.processes import is_stopped, process_state, processor_s, tree_of
from streamrl.supervise.child import Child
from streamrl.supervise.stopped import GRACE_S, StoppedProcesses

pytestmark = pytest.mark.timeout(60)
PARENT = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"


@pytest.fixture
def family() -> Iterator[tuple[Child, int]]:
    """A process, and the id of one that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    yield Child("learner", process, time.monotonic() - 7.0, Path("learner.log")), pid
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.01)


def test_a_process_is_known_with_what_it_has_started(family):
    child, grandchild = family
    assert list(tree_of(child.process.pid)) == [child.process.pid, grandchild]
    assert process_state(grandchild) in "RSD" and not is_stopped(grandchild)
    assert processor_s(child.process.pid) > 0.0
    free = 2**22 + 1
    assert (process_state(free), processor_s(free), list(tree_of(free))) == ("", 0.0, [free])


def test_the_sentence_of_a_process_says_that_it_is_stopped(family):
    child, _ = family
    assert f"runs for 7 s as process {child.process.pid}, with " in child.sentence(child.started_at + 7.0)
    stop(child.process.pid)
    assert f"as process {child.process.pid} and is stopped (SIGSTOP), with " in child.sentence(time.monotonic())


def test_what_the_learner_has_started_is_killed_once_it_was_stopped_for_too_long(family):
    child, grandchild = family
    watch, limit_s = StoppedProcesses(20.0), 20.0 + GRACE_S
    assert watch.end(child, [], 100.0) == ""
    stop(grandchild)
    assert watch.end(child, [], 102.0) == watch.end(child, [], 101.9 + limit_s) == ""
    os.kill(grandchild, signal.SIGCONT)
    while is_stopped(grandchild):
        time.sleep(0.01)
    assert watch.end(child, [], 104.0 + limit_s) == ""
    stop(grandchild)
    assert watch.end(child, [], 200.0) == "", "it counts from the new stop"

    told = watch.end(child, [], 200.0 + limit_s)

    assert told == f"process {grandchild} of learner was stopped (SIGSTOP) for {limit_s:.0f} s and has been killed"
    assert child.process.wait(30) == 0, "its parent has seen it end"


def test_of_an_actor_only_the_process_itself_and_with_0_nothing_is_killed(family):
    actor, grandchild = family
    actor.name = "actor-0"
    learner = Child("learner", subprocess.Popen(["sleep", "600"]), 0.0, actor.log_path)
    try:
        stop(grandchild)
        watch = StoppedProcesses(1.0)
        assert [watch.end(learner, [actor], now) for now in (100.0, 200.0)] == ["", ""] and is_stopped(grandchild)
        stop(actor.process.pid)
        off = StoppedProcesses(0.0)
        assert [off.end(actor, [actor], now) for now in (100.0, 200.0)] == ["", ""] and is_stopped(actor.process.pid)
        assert [watch.end(learner, [actor], now) for now in (300.0, 400.0)] == ["", ""], "the learner is well"
        assert actor.process.wait(30) == -signal.SIGKILL
    finally:
        learner.process.kill()
        learner.process.wait()
