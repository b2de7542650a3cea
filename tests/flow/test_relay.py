"""A run whose actors pull their weights from a relay, and what happens when it goes."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.flow.processes import SLOW, RunHarness, wait_until

FAR = ("actors.transports=[zmq]", "actors.share_weights=false")
"""An actor that is alone on its host."""


def relay(harness: RunHarness):
    """(process, endpoint) of a relay for this harness's learner."""
    process = harness.start("relay", [sys.executable, "-m", "streamrl.cli", "relay", "--learner", harness.address])
    log = harness.path / "relay.log"
    found = wait_until(lambda: re.search(r"listens at (tcp://\S+):", log.read_text()), 90, "the relay", harness.logs)
    return process, found[1]


def test_a_run_through_a_relay_and_the_learner_sends_its_weights_to_no_actor(harness: RunHarness):
    through, endpoint = relay(harness)
    learner = harness.learner("trainer.num_steps=12", *SLOW)  # time to look at a document while it lies there
    actors = [harness.actor(name, *FAR, f"actors.relay={endpoint}") for name in ("a0", "a1")]

    harness.wait_for_version(1, 200)
    run_id = (harness.run_dir / "run_id").read_text().strip()
    nbytes = next(Path("/dev/shm", f"streamrl-{run_id}").glob("w.*")).stat().st_size

    assert harness.finish(learner, 200) == 0, harness.logs()
    assert [harness.finish(process, 20) for process in (*actors, through)] == [0, 0, 0], harness.logs()
    row = harness.metrics()[-1]
    assets = (harness.run_dir / "assets.msgpack").stat().st_size
    # The relay stands on the learner's host, so it maps its documents; only the model's files are pulled, once. A busy
    # machine may send an actor to the learner now and then; two actors that always went there would pull 24 versions.
    assert assets <= row["hub/num_bytes_pulled"] <= assets + 4 * nbytes
    assert row["hub/num_actors"] <= 2 and row["hub/num_installs"] >= 12
    assert harness.summary()["num_groups_trained"] == 96
    assert harness.leftovers() == []


def test_a_killed_relay_costs_nothing_but_bandwidth(harness: RunHarness):
    through, endpoint = relay(harness)
    learner = harness.learner("trainer.num_steps=10", *SLOW)
    actor = harness.actor("a0", *FAR, f"actors.relay={endpoint}")
    harness.wait_for_version(3, 200)
    through.kill()

    assert harness.finish(learner, 200) == 0, harness.logs()
    assert harness.finish(actor, 20) == 0
    row = harness.metrics()[-1]
    assert row["hub/num_install_failures"] == 0 and row["hub/num_probe_failures"] == 0
    assert row["hub/num_bytes_pulled"] > (harness.run_dir / "assets.msgpack").stat().st_size
    assert "is not asked for" in (harness.path / "a0.log").read_text()
    assert harness.summary()["num_groups_trained"] == 80


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_relay_can_be_stopped_at_any_time_and_leaves_nothing(harness: RunHarness, signum: signal.Signals):
    through, endpoint = relay(harness)
    through.send_signal(signum)  # no peer left to notify
    assert harness.finish(through, 60) == 0, harness.logs()

    through, endpoint = relay(harness)
    learner = harness.learner("trainer.num_steps=1000")
    wait_until(lambda: "joined run" in (harness.path / "relay.log").read_text(), 120, "the relay's link", harness.logs)
    through.send_signal(signum)
    assert harness.finish(through, 60) == 0, harness.logs()
    assert learner.poll() is None
    assert "Traceback" not in (harness.path / "relay.log").read_text()


def test_an_address_in_use_is_named(harness: RunHarness, tmp_path: Path):
    _, endpoint = relay(harness)
    second = harness.start("second", [
        sys.executable, "-m", "streamrl.cli", "relay", "--learner", harness.address, "--bind", endpoint,
    ])

    assert harness.finish(second, 60) == 2
    assert f"--bind: {endpoint} is in use by another process" in (harness.path / "second.log").read_text()
