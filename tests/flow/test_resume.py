"""The learner dies and starts again; its actors live on and find it."""

import json
import signal
from collections import Counter

from streamrl.metrics.samples import read_samples
from tests.flow.processes import SLOW, RunHarness, wait_until

NUM_STEPS = 80
NUM_SLOW_STEPS = 36


def test_a_killed_learner_resumes_and_its_actors_reconnect_by_themselves(harness: RunHarness):
    # Slow enough that both actors, whose HELLOs are up to 5 s apart by then, find the second learner at work.
    words = (f"trainer.num_steps={NUM_SLOW_STEPS}", "checkpoint.every_steps=3", *SLOW)
    first = harness.learner(*words)
    actors = [harness.actor("a0"), harness.actor("a1")]
    wait_until(lambda: list(harness.run_dir.glob("ckpt-00000006")), 90, "a checkpoint", harness.logs)
    first.kill()
    first.wait()
    saved = int((harness.run_dir / "LATEST").read_text().strip().rpartition("-")[2])

    second = harness.learner(*words, "checkpoint.resume=true")

    assert harness.finish(second, 120) == 0, harness.logs()
    for actor in actors:
        assert harness.finish(actor, 15) == 0, harness.logs()
    rows = harness.metrics()
    versions = [row["run/version"] for row in rows if "policy/loss" in row]
    assert versions == list(range(1, NUM_SLOW_STEPS + 1)), "every version once, in order, none lost or repeated"
    # The epoch goes on where the log had batches after the checkpoint, trained again; else a new one begins.
    recovered = " batches of the log again" in (harness.path / "learner.log").read_text()
    assert {row["run/epoch"] for row in rows} == ({1.0} if recovered else {1.0, 2.0})
    samples = Counter(one.step for one in read_samples(harness.run_dir) if one.kind == "train")
    assert max(samples.values()) == 4 and all(samples[step] == 4 for step in range(saved + 1, NUM_SLOW_STEPS + 1))
    if not recovered:
        assert next(row["run/version"] for row in rows if row["run/epoch"] == 2.0) == saved + 1 >= 4
    summary = harness.summary()
    assert summary["num_groups_trained"] == NUM_SLOW_STEPS * 8 and summary["num_lag_violations"] == 0
    assert summary["num_actor_restarts"] == 0
    for name in ("a0", "a1"):
        assert (harness.path / f"{name}.log").read_text().count("joined run") == 2
    harness.close()
    assert harness.leftovers() == []


def test_a_learner_told_to_stop_saves_first_and_its_successor_repeats_nothing(harness: RunHarness):
    first = harness.learner(f"trainer.num_steps={NUM_STEPS}", "checkpoint.every_steps=50", *SLOW)
    actor = harness.actor("a0")
    harness.wait_for_version(3)
    first.send_signal(signal.SIGTERM)
    assert harness.finish(first, 20) == 0, harness.logs()
    assert f"go on with:  streamrl resume {harness.run_dir}" in (harness.path / "learner.log").read_text()
    stopped_at = harness.metrics()[-1]["run/version"]

    second = harness.learner("trainer.num_steps=30", "checkpoint.every_steps=50", "checkpoint.resume=true", *SLOW)

    assert harness.finish(second, 120) == 0, harness.logs()
    assert harness.finish(actor, 15) == 0
    trained = [row["run/version"] for row in harness.metrics() if "policy/loss" in row]
    assert 3 <= stopped_at < 30 and trained == list(range(1, 31))


def test_a_learner_notes_what_it_was_asked_for_before_what_takes_long(harness: RunHarness):
    (harness.run_dir / "stream").mkdir(parents=True)
    (harness.run_dir / "stream" / "00000001.seg").write_bytes(b"x" * 99)  # where its set-up ends, in place of a kill
    assert harness.finish(harness.learner("trainer.num_steps=7"), 120) != 0, harness.logs()
    assert "trainer.num_steps=7" in json.loads((harness.run_dir / "run.json").read_text())["starts"][-1]["command"]


def test_a_second_learner_on_a_living_run_is_refused(harness: RunHarness):
    first = harness.learner("trainer.num_steps=1000")
    wait_until(lambda: (harness.run_dir / "hub.json").exists(), 60, "the hub", harness.logs)

    second = harness.start("second", [*_learner_command(harness), "checkpoint.resume=true"])

    assert harness.finish(second, 60) == 1
    assert "belongs to a learner that is still running" in (harness.path / "second.log").read_text()
    assert first.poll() is None


def _learner_command(harness: RunHarness) -> list[str]:
    import sys

    return [sys.executable, "-m", "learner", *harness.words()]


def test_an_actor_that_outlived_its_learner_joins_another_run_at_the_same_address(harness: RunHarness):
    first = harness.learner("trainer.num_steps=1000")
    actor = harness.actor("a0")
    harness.wait_for_version(2)
    first.kill()
    first.wait()

    second = harness.learner("trainer.num_steps=5", f"run.dir={harness.path / 'other'}")

    assert harness.finish(second, 120) == 0, harness.logs()
    assert harness.finish(actor, 15) == 0, harness.logs()
    assert "another run is at" in (harness.path / "a0.log").read_text()


def test_actors_that_outlive_a_learner_take_on_the_settings_of_the_resumed_run(harness: RunHarness):
    words = ("trainer.num_steps=12", "checkpoint.every_steps=2", *SLOW)
    first = harness.learner(*words)
    actor = harness.actor("a0")
    wait_until(lambda: list(harness.run_dir.glob("ckpt-00000002")), 90, "a checkpoint", harness.logs)
    first.kill()
    first.wait()

    second = harness.learner(*words, "checkpoint.resume=true", "rollout.train.sampling.max_new_tokens=5")

    assert harness.finish(second, 120) == 0, harness.logs()
    assert harness.finish(actor, 15) == 0, harness.logs()
    log = (harness.path / "a0.log").read_text()
    assert "the run has other settings than this actor was built for" in log and log.count("joined run") == 3
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    lengths = {row["run/version"]: row["rollout/response_tokens/train"] for row in rows}
    assert lengths[1.0] == 32 and lengths[12.0] == 5
    assert harness.summary()["num_groups_trained"] == 12 * 8
    assert harness.leftovers() == []
