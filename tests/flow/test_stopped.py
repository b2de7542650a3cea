"""Processes of a launched run that are stopped (SIGSTOP), the learner before its first step: each is started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.flow.processes import SLOW, RunHarness, _command_lines, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.fresh_processes, pytest.mark.timeout(400)]
NUM_STEPS = 8


def process_of(harness: RunHarness, module: str, word: str) -> int:
    """The process id of a part of the run; 0 before it is there."""
    found = [pid for pid, words in _command_lines() if f"-m {module} " in words and word in words]
    return found[0] if found and not any("--check" in words for pid, words in _command_lines() if pid in found) else 0


def status(harness: RunHarness) -> str:
    command = [sys.executable, "-m", "streamrl.cli", "status", str(harness.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_learner_stopped_in_its_set_up_a_hub_and_an_actor_are_noticed_and_started_again(harness: RunHarness):
    launch = harness.launch(
        f"trainer.num_steps={NUM_STEPS}", "launch.num_actors=1", "learner.rank_silent_s=10",
        "checkpoint.every_steps=2", "checkpoint.export_hf=false", *SLOW,
    )
    printed = harness.path / "launch.log"

    def printed_again(times: int) -> bool:
        return printed.read_text().count("The learner is started again") == times

    learner = wait_until(
        lambda: process_of(harness, "learner", f"run.dir={harness.run_dir}"), 90, "the learner", harness.logs
    )
    os.kill(learner, signal.SIGSTOP)
    assert not (harness.run_dir / "hub.json").exists(), "it was stopped before it had a hub"
    assert f"as process {learner} and is stopped (SIGSTOP)" in wait_until(
        lambda: "stopped" in (told := status(harness)) and told, 30, "the sentence", harness.logs
    )
    wait_until(lambda: printed_again(1), 60, "a second learner", harness.logs)
    assert f"process {learner} of learner was stopped (SIGSTOP)" in printed.read_text()

    harness.wait_for_version(1, 120)
    os.kill(json.loads((harness.run_dir / "hub.json").read_text())["pid"], signal.SIGSTOP)
    told = status(harness)
    assert "hub       does not answer" in told and "learner   runs for " in told, told
    wait_until(lambda: printed_again(2), 60, "a third learner", harness.logs)

    harness.wait_for_actor("actor-0", 120)
    actor = process_of(harness, "actors", "actors.actor_id=actor-0")
    os.kill(actor, signal.SIGSTOP)
    wait_until(lambda: f"process {actor} of actor-0 was stopped" in printed.read_text(), 60, "its end", harness.logs)

    assert harness.finish(launch, 240) == 0, harness.logs()
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["run/version"] for row in rows] == list(range(1, NUM_STEPS + 1)), "every version once, in order"
    assert harness.summary()["num_lag_violations"] == 0 and harness.leftovers() == []
