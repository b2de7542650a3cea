"""The hub's death is the learner's death: loud, with nothing left behind, and `launch` starts both again."""

import json
import os
import signal
import subprocess

import pytest

from learner.hub_client.process import HubProcess
from streamrl.errors import StreamrlError
from streamrl.supervise.learner import LearnerRestarts
from tests.flow.processes import SLOW, RunHarness, wait_until

NUM_STEPS = 10


def test_a_killed_hub_ends_the_learner_with_its_name_and_leaves_no_socket(harness: RunHarness):
    learner = harness.learner("trainer.num_steps=1000")
    wait_until(lambda: (harness.run_dir / "hub.json").exists(), 60, "the hub", harness.logs)
    settings = json.loads((harness.run_dir / "hub_settings.json").read_text())
    folder = os.path.dirname(settings["rank_endpoint"].removeprefix("ipc://"))
    assert os.path.isdir(folder)

    os.kill(json.loads((harness.run_dir / "hub.json").read_text())["pid"], signal.SIGKILL)

    assert harness.finish(learner, 30) == 1, harness.logs()
    assert "the hub process was killed by SIGKILL" in (harness.path / "learner.log").read_text()
    assert not os.path.exists(folder) and harness.leftovers() == []


def test_a_killed_hub_is_treated_like_a_killed_learner_under_launch(harness: RunHarness):
    launch = harness.launch(
        f"trainer.num_steps={NUM_STEPS}", "launch.num_actors=1", "checkpoint.every_steps=2",
        "checkpoint.export_hf=false", *SLOW,
    )
    harness.wait_for_version(3, 240)
    (actor,) = (row[0] for row in harness.status()["actors"])

    os.kill(json.loads((harness.run_dir / "hub.json").read_text())["pid"], signal.SIGKILL)

    assert harness.finish(launch, 300) == 0, harness.logs()
    printed = (harness.path / "launch.log").read_text()
    assert "the hub process was killed by SIGKILL\nThe learner is started again, from ckpt-0000000" in printed
    assert (harness.run_dir / "EPOCH").read_text().strip() == "2"
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["run/version"] for row in rows] == list(range(1, NUM_STEPS + 1)), "every version once, in order"
    assert harness.summary()["num_groups_trained"] == NUM_STEPS * 8 and harness.summary()["num_lag_violations"] == 0
    assert "was restarted" not in (harness.run_dir / "logs" / "learner.log").read_text(), f"{actor} lived through it"
    assert harness.leftovers() == []


@pytest.mark.parametrize(("command", "restarted"), [("kill -SEGV $$", True), ("exit 3", False)])
def test_a_hub_that_fails_by_itself_would_fail_again(tmp_path, command, restarted):
    hub = HubProcess.__new__(HubProcess)
    hub._run_dir, hub.process = tmp_path, subprocess.Popen(["bash", "-c", command])
    hub.process.wait()

    with pytest.raises(StreamrlError, match="SIGSEGV" if restarted else "ended with status 3"):
        hub.check()

    assert bool(LearnerRestarts(tmp_path, 3).cause(1)) == restarted
