"""A forked program is what a new Python would be: streams, environment, session, command line, exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import ROOT

pytestmark = [
    pytest.mark.flow, pytest.mark.timeout(200), pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
]
CHILD = [sys.executable, "-P", "-m", "tests.fakes.child"]


@pytest.fixture
def forks_child(fork_server, monkeypatch):
    monkeypatch.setattr(ForkedPopen, "programs", (*ForkedPopen.programs, "tests.fakes.child"))


def facts_of(popen: type[subprocess.Popen], folder: Path, *words: str) -> tuple[dict, int, str]:
    """(what it says of itself, its exit status, its error output)."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "OF_THE_TEST": "1"}
    with popen(
        [*CHILD, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
        env=environment, start_new_session=True, text=True,
    ) as child:
        child.stdin.write("to read")
        child.stdin.close()
        facts = json.loads(child.stdout.readline())
        errors = child.stderr.read()
    return facts, child.returncode, errors


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("7", 7), ("raise", 1), ("killed", -signal.SIGTERM)])
def test_a_fork_is_like_a_new_process(forks_child, tmp_path, how, code):
    new, new_code, _ = facts_of(subprocess.Popen, tmp_path, how, "a b")
    forked, forked_code, errors = facts_of(ForkedPopen, tmp_path, how, "a b")

    assert forked_code == new_code == code
    assert "its error output" in errors and ("by an exception" in errors) == (how == "raise")
    assert new.pop("parent") == os.getpid() != forked.pop("parent")
    assert set(new.pop("path")) <= set(forked.pop("path"))
    assert forked == new and new["read"] == "to read" and new["leads"] and new["words"] == [how, "a b"]


def test_a_fork_is_run_to_its_end_with_its_output(forks_child, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    done = subprocess.run([*CHILD, "7"], input="to read", capture_output=True, text=True, timeout=60)
    facts = json.loads(done.stdout)
    assert (done.returncode, done.stderr, facts["read"]) == (7, "its error output\n", "to read")
    assert facts["parent"] != os.getpid()


def test_a_forks_children_are_forked_too_and_it_can_be_signaled_and_waited_for(forks_child, tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as output:
        parent = ForkedPopen([*CHILD, "child"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    assert parent.wait(30) == parent.poll() == 3
    facts = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert len({one["parent"] for one in facts}) == 1 and [one["words"] for one in facts] == [["child"], ["3"]]

    waits = ForkedPopen([*CHILD, "0"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert waits.poll() is None and Path(f"/proc/{waits.pid}").exists()
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.1)
    waits.kill()
    assert waits.wait(30) == -signal.SIGKILL
    waits.stdin.close()


def test_what_is_no_program_of_ours_is_started_as_ever(fork_server):
    assert ForkedPopen([sys.executable, "-c", "raise SystemExit(5)"]).wait(30) == 5
    assert ForkedPopen("exit 6", shell=True).wait(30) == 6
