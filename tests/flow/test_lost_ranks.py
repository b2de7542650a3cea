"""A learner rank that is stopped or killed: named by the watchdog, and the learner starts again from its checkpoint."""

import os
import signal
import time
from pathlib import Path

from tests.flow.processes import SLOW, RunHarness, _command_lines, wait_until

NUM_STEPS = 14


def rank_process(harness: RunHarness, rank: int) -> int:
    """The process id of a living rank; 0 before it is there."""
    for pid, words in _command_lines():
        if f"run.dir={harness.run_dir}" not in words or "-m learner" not in words or "torch.distributed" in words:
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"RANK=%d" % rank in environment:
            return pid
    return 0


def epoch(harness: RunHarness) -> int:
    return int((harness.run_dir / "EPOCH").read_text())


def test_a_stopped_and_a_killed_rank_are_named_and_the_run_goes_on_from_its_checkpoint(harness: RunHarness):
    launch = harness.launch(
        f"trainer.num_steps={NUM_STEPS}", "launch.num_learner_ranks=2", "launch.num_actors=1",
        "learner.rank_silent_s=5", "checkpoint.every_steps=2", "checkpoint.export_hf=false", *SLOW,
    )
    printed = harness.path / "launch.log"
    harness.wait_for_version(3, 180)

    stopped = rank_process(harness, 1)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: epoch(harness) == 2, 120, "a second learner", harness.logs)
    print(f"SIGSTOP to restart: {time.monotonic() - began:.1f} s")
    wait_until(lambda: harness.status()["version"] >= 5, 120, "its steps", harness.logs)
    print(f"SIGSTOP to a later version: {time.monotonic() - began:.1f} s")
    assert f"learner rank 1 (process {stopped}) has been silent for" in printed.read_text()
    assert "and is stopped (SIGSTOP)" in printed.read_text() and "ckpt-0000000" in printed.read_text()

    killed = wait_until(lambda: rank_process(harness, 0), 60, "rank 0", harness.logs)
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: epoch(harness) == 3, 120, "a third learner", harness.logs)
    print(f"SIGKILL to restart: {time.monotonic() - began:.1f} s")
    assert f"(process {killed}) was killed" in printed.read_text()

    assert harness.finish(launch, 240) == 0, harness.logs()
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["run/version"] for row in rows] == list(range(1, NUM_STEPS + 1)), "every version once, in order"
    assert {row["run/epoch"] for row in rows} <= {1.0, 2.0, 3.0}
    assert harness.summary()["num_groups_trained"] == NUM_STEPS * 8 and harness.summary()["num_lag_violations"] == 0
    assert harness.leftovers() == []
