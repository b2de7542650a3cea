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

from streamrl.config.schema import Config, RunConfig
from streamrl.metrics.files import append_lines, write_atomic
from streamrl.processes import is_stopped, process_state, processor_s
from streamrl.run_dirs import choose_run_dir, note_start
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
