"""The second chance of a few failed tests: what passes is named in a report, what fails again stays a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
from pathlib import Path
import pytest

def test_late_once():
    late = not Path("ran").exists()
    Path("ran").touch()
    assert not late, "it came late"

def test_passes():
    pass

@pytest.mark.parametrize("number", range({num_wrong}))
def test_wrong(number):
    assert False
"""


@pytest.mark.parametrize(("num_wrong", "status", "again"), [(0, 0, True), (1, 1, True), (3, 1, False)])
def test_what_passes_alone_is_named_and_what_fails_again_fails(tmp_path, num_wrong, status, again):
    (tmp_path / "test_some.py").write_text(TESTS.format(num_wrong=num_wrong))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)  # this process may be one, those below are none

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    first = run("pytest", "-q", "--cache-clear", "-p", "no:hypothesispytest", "-p", "tests.failed_again")
    assert first.returncode == 1, first.stdout
    second = run("tests.failed_again", "1")

    assert second.returncode == status, second.stdout
    assert (f"{num_wrong + 1} failed beside other tests, run once more, alone:" in second.stdout) == again
    assert ("failed beside other tests and passed alone" in second.stdout) == again
    report = tmp_path / "build" / "failed_once.txt"
    names = ["test_some.py::test_late_once", "    AssertionError: it came late"] if again else []
    assert (report.read_text().splitlines()[:2] if report.exists() else []) == names


def test_another_exit_status_than_that_of_failed_tests_stays(tmp_path):
    command = [sys.executable, "-m", "tests.failed_again", "4"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 4 and not list(tmp_path.iterdir())
