"""kill -9 of `streamrl launch` while the run is still being set up: whatever its processes do, none is left."""

import os
import signal
from pathlib import Path

import pytest

from tests.flow.processes import RunHarness, wait_until

FRESH = pytest.mark.fresh_processes
MARK = "STREAMRL_TEST_OF"
TASK = """
import pathlib, sys, time
words = " ".join(sys.argv)
role = "check" if "--check" in words else "actor" if "connect=" in words else "learner"
if role == {role!r}:
    (pathlib.Path(__file__).parent / "reached").touch()
    time.sleep(3600)
def record(split, index): return {{"prompt": "x"}}
def reward(record, completion): return float(len(completion) % 2)
"""
"""Loading it takes an hour in one of the roles, and tells when it has begun."""


def marked(mark: str) -> list[str]:
    """The processes that inherited the mark, whatever they have become."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(f"{entry.name}: {words.decode(errors='replace')}")
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("role", "more"),
    [("check", ()), ("learner", ()), ("learner", ("launch.num_learner_ranks=2",)), ("actor", ())],
    ids=["check", "learner", "ranks", "actor"],
)
def test_nothing_is_left_of_a_run_whose_launcher_is_killed_while_its_task_loads(harness, monkeypatch, role, more):
    monkeypatch.setenv(MARK, str(harness.path))
    (harness.path / "task.py").write_text(TASK.format(role=role))
    launch = harness.launch(f"env.path={harness.path / 'task.py'}", "policy.tiny.num_warm_start_steps=0", *more)
    wait_until((harness.path / "reached").exists, 90, f"the task in the {role}", harness.logs)

    killed_and_gone(harness, launch.pid)


@pytest.mark.parametrize(
    "moment", [pytest.param("learner", marks=FRESH), pytest.param("ranks", marks=FRESH), "hub", "joined"]
)
def test_nothing_is_left_of_a_run_whose_launcher_is_killed_at_a_moment_of_its_set_up(harness, monkeypatch, moment):
    """`learner` and `ranks`: as soon as there is a process, which still imports; `hub`: it listens, actors start."""
    monkeypatch.setenv(MARK, str(harness.path))
    launch = harness.launch(*(["launch.num_learner_ranks=2"] if moment == "ranks" else []))
    logs, conditions = harness.run_dir / "logs", {
        "hub": lambda: (harness.run_dir / "hub.json").exists(),
        "joined": lambda: any("joined run" in path.read_text() for path in logs.glob("actor-*.log")),
    }
    wait_until(conditions.get(moment, (logs / "learner.log").exists), 90, moment, harness.logs)

    killed_and_gone(harness, launch.pid)


def killed_and_gone(harness: RunHarness, pid: int) -> None:
    assert marked(str(harness.path))
    os.kill(pid, signal.SIGKILL)
    harness.processes[-1].wait()
    gone = lambda: not marked(str(harness.path))  # noqa: E731
    wait_until(gone, 60, f"the end of {marked(str(harness.path))}", harness.logs)
