"""The system's answers about other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamrl.config.schema import Config, RunConfig
from streamrl.metrics.files import append_lines, write_atomic
from streamrl.processes import Child, is_stopped, process_state, processor_s
from streamrl.run_dirs import choose_run_dir, note_start
from streamrl.supervise.child import Supervised, log_tail
from streamrl.transport.control import is_running
from streamrl.transport.peers import raise_descriptor_limit

pytestmark = pytest.mark.timeout(60)
# Some ticks of the clock by which the kernel counts processor time.
BUSY = "import time\nwhile time.process_time() < 0.1: pass\nprint('begun', flush=True); input()"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Supervised]:
    """A process that has begun and waits."""
    child = Supervised("learner", [sys.executable, "-c", BUSY], tmp_path)
    while "begun" not in log_tail(child.log_path, 1):
        time.sleep(0.01)
    yield child
    child.kill()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.01)


@pytest.mark.parametrize("has_proc", [True, False])
def test_state_and_processor_time_of_a_process(child, monkeypatch, has_proc):
    monkeypatch.setattr("streamrl.processes.HAS_PROC", has_proc)
    assert process_state(child.pid) in "RSD" and not is_stopped(child.pid)
    assert processor_s(child.pid) > 0.0
    free = 2**22 + 1
    assert (process_state(free), processor_s(free)) == ("", 0.0)
    assert is_running({"pid": child.pid}) and not is_running({"pid": free}) and not is_running({})


def test_the_sentence_of_a_process_says_that_it_is_stopped(child):
    assert f"has run for 7 s as process {child.pid}, with " in child.sentence(child.started_at + 7.0)
    stop(child.pid)
    assert f"as process {child.pid} and is stopped (SIGSTOP), with " in child.sentence(time.monotonic())


def test_what_a_program_writes_is_for_its_owner_and_what_users_share_as_they_have_it(tmp_path):
    program = (
        "from pathlib import Path\nfrom streamrl.processes import for_all, keep_private\n"
        "keep_private()\nPath('own').touch()\nPath('folder').mkdir()\n"
        "with for_all():\n    Path('shared').touch()\n"
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    child = (
        "from pathlib import Path\nfrom streamrl.processes import for_all, keep_private\nPath('childs').touch()\n"
        "keep_private()\nwith for_all():\n    Path('also_shared').touch()\n"
    )
    subprocess.run(
        [sys.executable, "-c", program.format(child=child)], cwd=tmp_path, check=True, umask=0o022,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"own": 0o600, "folder": 0o700, "childs": 0o600, "shared": 0o644, "also_shared": 0o644}


def test_a_run_directory_and_its_files_are_for_their_owner_whatever_the_umask_is(tmp_path):
    before = os.umask(0)
    try:
        run_dir = choose_run_dir(Config(run=RunConfig(name="one", root=str(tmp_path))))
        write_atomic(run_dir / "summary.json", "{}")
        append_lines(run_dir / "metrics.jsonl", b"{}\n")
        note_start(run_dir, ["streamrl", "launch"])
    finally:
        os.umask(before)

    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in run_dir.iterdir()} == dict.fromkeys(
        ("summary.json", "metrics.jsonl", "run.json", "run.json.signature"), 0o600
    )


def test_a_child_answers_and_says_why_it_ended():
    program = "import sys; print(input(), flush=True); print('first', file=sys.stderr); sys.exit('no weights')"
    child = Child([sys.executable, "-c", program], answers=True, keep_errors=True)
    deadline = time.monotonic() + 30

    child.send(b"seven\n", deadline)

    assert child.receive(3, deadline) == b"sev" and child.receive_line(deadline) == b"en"
    with pytest.raises(EOFError):
        child.receive_line(deadline)
    assert child.how_it_ended(30) == (1, "no weights")


def test_a_child_that_neither_reads_nor_writes_is_late_and_killed_with_its_group():
    program = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(1000)"
    child = Child([sys.executable, "-c", program], answers=True)
    pids = [int(child.receive_line(time.monotonic() + 30)) for _ in range(2)]

    with pytest.raises(TimeoutError):
        child.receive_line(time.monotonic() + 0.1)
    with pytest.raises(TimeoutError):
        child.send(bytes(1 << 20), time.monotonic() + 0.1)
    assert child.poll() is None and not child.ends_within(0.0)
    assert child.kill() == -signal.SIGKILL
    while any(process_state(pid) not in ("", "Z") for pid in pids):
        time.sleep(0.01)


def test_a_child_answers_a_process_that_has_more_descriptors_open_than_select_takes():
    raise_descriptor_limit()
    with ExitStack() as opened:
        while opened.enter_context(open(os.devnull, "rb")).fileno() < 1030:
            pass
        child = Child([sys.executable, "-c", "print(input())"], answers=True)
        opened.callback(child.kill)
        deadline = time.monotonic() + 30

        child.send(b"seven\n", deadline)

        assert child.process.stdin.fileno() > 1023 and child.receive_line(deadline) == b"seven"


def test_a_log_of_a_child_is_for_its_owner_whatever_the_umask_is(tmp_path):
    before = os.umask(0)
    try:
        child = Child([sys.executable, "-c", "import os; os.system('echo here >&2')"], log=tmp_path / "log")
    finally:
        os.umask(before)
    assert child.ends_within(30) and (tmp_path / "log").read_text() == "here\n"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
