"""The hub's death is the learner's death: loud, and with nothing left behind."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.flow.processes import RunHarness, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.timeout(120)]


def test_a_killed_hub_ends_the_learner_with_its_name_and_leaves_no_socket(harness: RunHarness):
    learner = harness.learner("trainer.num_steps=1000")
    wait_until(lambda: (harness.run_dir / "hub.json").exists(), 60, "the hub", harness.logs)
    settings = json.loads((harness.run_dir / "hub_settings.json").read_text())
    folder = os.path.dirname(settings["rank_endpoint"].removeprefix("ipc://"))
    assert os.path.isdir(folder)

    os.kill(json.loads((harness.run_dir / "hub.json").read_text())["pid"], signal.SIGKILL)

    assert harness.finish(learner, 30) == 1, harness.logs()
    assert "the hub process ended with status -9" in (harness.path / "learner.log").read_text()
    assert not os.path.exists(folder) and harness.leftovers() == []
