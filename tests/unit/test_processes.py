"""What /proc tells of other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.processes import is_stopped, process_state, processor_s
from streamrl.supervise.child import Child

pytestmark = pytest.mark.timeout(60)
# Some ticks of the clock by which the kernel counts processor time.
BUSY = "import time\nwhile time.process_time() < 0.1: pass\nprint('begun', flush=True); input()"


@pytest.fixture
def child() -> Iterator[Child]:
    """A process that has begun and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    yield Child("learner", process, time.monotonic() - 7.0, Path("learner.log"))
    process.kill()
    process.wait()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.01)


def test_state_and_processor_time_of_a_process(child):
    assert process_state(child.process.pid) in "RSD" and not is_stopped(child.process.pid)
    assert processor_s(child.process.pid) > 0.0
    free = 2**22 + 1
    assert (process_state(free), processor_s(free)) == ("", 0.0)


def test_the_sentence_of_a_process_says_that_it_is_stopped(child):
    assert f"runs for 7 s as process {child.process.pid}, with " in child.sentence(child.started_at + 7.0)
    stop(child.process.pid)
    assert f"as process {child.process.pid} and is stopped (SIGSTOP), with " in child.sentence(time.monotonic())
