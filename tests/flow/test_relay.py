"""A run whose actors pull their weights from a relay, and what happens when it goes."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.flow.processes import SLOW, Stage, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.timeout(480)]
FAR = ("actors.transports=[zmq]", "actors.share_weights=false")
"""An actor that is alone on its host."""


def relay(stage: Stage):
    """(process, endpoint) of a relay for this stage's learner."""
    process = stage.start("relay", [sys.executable, "-m", "streamrl.cli", "relay", "--learner", stage.address])
    log = stage.path / "relay.log"
    found = wait_until(lambda: re.search(r"listens at (tcp://\S+):", log.read_text()), 90, "the relay", stage.logs)
    return process, found[1]


def test_a_run_through_a_relay_and_the_learner_sends_its_weights_to_no_actor(stage: Stage):
    through, endpoint = relay(stage)
    learner = stage.learner("trainer.num_steps=12", *SLOW)  # time to look at a document while it lies there
    actors = [stage.actor(name, *FAR, f"actors.relay={endpoint}") for name in ("a0", "a1")]

    stage.wait_for_version(1, 200)
    run_id = (stage.run_dir / "run_id").read_text().strip()
    nbytes = next(Path("/dev/shm", f"streamrl-{run_id}").glob("w.*")).stat().st_size

    assert stage.finish(learner, 200) == 0, stage.logs()
    assert [stage.finish(process, 20) for process in (*actors, through)] == [0, 0, 0], stage.logs()
    row = stage.metrics()[-1]
    assets = (stage.run_dir / "assets.msgpack").stat().st_size
    # The relay stands on the learner's host, so it maps its documents; only the model's files are pulled, once. A busy
    # machine may send an actor to the learner now and then; two actors that always went there would pull 24 versions.
    assert assets <= row["hub/num_bytes_pulled"] <= assets + 4 * nbytes
    assert row["hub/num_actors"] <= 2 and row["hub/num_installs"] >= 12
    assert stage.summary()["num_groups_trained"] == 96
    assert stage.leftovers() == []


def test_a_killed_relay_costs_nothing_but_bandwidth(stage: Stage):
    through, endpoint = relay(stage)
    learner = stage.learner("trainer.num_steps=10", *SLOW)
    actor = stage.actor("a0", *FAR, f"actors.relay={endpoint}")
    stage.wait_for_version(3, 200)
    through.kill()

    assert stage.finish(learner, 200) == 0, stage.logs()
    assert stage.finish(actor, 20) == 0
    row = stage.metrics()[-1]
    assert row["hub/num_install_failures"] == 0 and row["hub/num_probe_failures"] == 0
    assert row["hub/num_bytes_pulled"] > (stage.run_dir / "assets.msgpack").stat().st_size
    assert "is left out for" in (stage.path / "a0.log").read_text()
    assert stage.summary()["num_groups_trained"] == 80


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_relay_can_be_stopped_at_any_time_and_leaves_nothing(stage: Stage, signum: signal.Signals):
    through, endpoint = relay(stage)
    through.send_signal(signum)  # nobody to say goodbye to
    assert stage.finish(through, 60) == 0, stage.logs()

    through, endpoint = relay(stage)
    learner = stage.learner("trainer.num_steps=1000")
    wait_until(lambda: "joined run" in (stage.path / "relay.log").read_text(), 120, "the relay's link", stage.logs)
    through.send_signal(signum)
    assert stage.finish(through, 60) == 0, stage.logs()
    assert learner.poll() is None
    assert "Traceback" not in (stage.path / "relay.log").read_text()


def test_an_address_in_use_is_named(stage: Stage, tmp_path: Path):
    _, endpoint = relay(stage)
    second = stage.start("second", [
        sys.executable, "-m", "streamrl.cli", "relay", "--learner", stage.address, "--bind", endpoint,
    ])

    assert stage.finish(second, 60) == 2
    assert f"--bind: {endpoint} is in use by another process" in (stage.path / "second.log").read_text()
