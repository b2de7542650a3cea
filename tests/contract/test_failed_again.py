"""The second chance of a few failed tests: what passes is named in a report, what fails again stays a failure."""

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
    assert not late, "it came late" + "." * 2000 + "and is tired"

def test_passes():
    pass

@pytest.mark.parametrize("number", range({num_wrong}))
def test_wrong(number):
    assert False
"""


def of_no_worker() -> dict[str, str]:
    """The environment of the processes below: this one may be a worker of pytest-xdist, they are none."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"} | {
        "PYTHONPATH": str(ROOT)
    }


@pytest.mark.parametrize(("num_wrong", "status", "again"), [(0, 0, True), (1, 1, True), (3, 1, False)])
def test_what_passes_alone_is_named_and_what_fails_again_fails(tmp_path, num_wrong, status, again):
    (tmp_path / "test_some.py").write_text(TESTS.format(num_wrong=num_wrong))
    environment = of_no_worker()

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
    name, said, *_ = [*report.read_text().splitlines(), ""] if report.exists() else ("", "")
    assert (name, said.startswith("    AssertionError: it came late")) == (
        ("test_some.py::test_late_once", True) if again else ("", False)
    )
    assert ("[...]" in second.stdout and "and is tired" in second.stdout) == again


def test_a_file_that_cannot_be_read_takes_no_second_chance_from_others(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS.format(num_wrong=0))
    (tmp_path / "test_broken.py").write_text("from os import no_such_name")
    environment = of_no_worker()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "--continue-on-collection-errors"]
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=60)
    again = [sys.executable, "-m", "tests.failed_again", "1"]
    assert subprocess.run(again, cwd=tmp_path, env=environment, timeout=60).returncode == 1
    assert (tmp_path / "build" / "failed_once.txt").read_text().startswith("test_some.py::test_late_once")


def test_another_exit_status_than_that_of_failed_tests_stays(tmp_path):
    command = [sys.executable, "-m", "tests.failed_again", "4"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 4 and not list(tmp_path.iterdir())
