"""Actors come, go and die while the learner runs; it loses nothing and trains exactly what it should."""

import signal

from tests.flow.processes import SLOW, RunHarness, wait_until

NUM_STEPS = 40


def test_actors_join_and_are_killed_while_training_goes_on(harness: RunHarness):
    learner = harness.learner(f"trainer.num_steps={NUM_STEPS}", "staleness.eta=2", "hub.dead_after_s=2", *SLOW)
    actors = {name: harness.actor(name) for name in ("a0", "a1")}
    harness.wait_for_version(2)

    actors["a2"] = harness.actor("a2")
    harness.wait_for_actor("a2")
    actors["a0"].kill()
    harness.wait_for_eviction("a0")
    wait_until(lambda: harness.counter("num_leases_reissued") >= 1, 20, "a reissued lease", harness.logs)

    assert harness.finish(learner, 150) == 0, harness.logs()
    assert harness.finish(actors["a1"], 15) == 0 and harness.finish(actors["a2"], 15) == 0, harness.logs()
    summary = harness.summary()
    assert summary["num_groups_trained"] == NUM_STEPS * 8
    assert summary["num_lag_violations"] == 0 and summary["lag_max"] <= summary["max_lag_bound"] == 3
    assert summary["num_leases_reissued"] >= 1
    assert "a2" in (harness.path / "learner.log").read_text() and harness.metrics()[-1]["hub/num_actors"] >= 1
    harness.close()
    assert harness.leftovers() == []


def test_an_actor_that_leaves_gracefully_hands_its_leases_back(harness: RunHarness):
    learner = harness.learner("trainer.num_steps=60")
    leaver, stayer = harness.actor("leaver"), harness.actor("stayer")
    harness.wait_for_actor("leaver")
    harness.wait_for_version(3)

    leaver.send_signal(signal.SIGTERM)

    assert harness.finish(leaver, 20) == 0, harness.logs()
    assert "left cleanly" in (harness.path / "leaver.log").read_text()
    assert harness.finish(learner, 120) == 0 and harness.finish(stayer, 15) == 0
    assert harness.summary()["num_groups_trained"] == 60 * 8
    assert harness.counter("num_evictions") == 0


def test_a_stopped_actor_that_comes_back_is_welcome_and_nothing_is_trained_twice(harness: RunHarness):
    learner = harness.learner(f"trainer.num_steps={NUM_STEPS}", "hub.dead_after_s=2", *SLOW)
    zombie, other = harness.actor("zombie"), harness.actor("other")
    harness.wait_for_actor("zombie")
    harness.wait_for_version(2)

    zombie.send_signal(signal.SIGSTOP)
    harness.wait_for_eviction("zombie")
    zombie.send_signal(signal.SIGCONT)
    harness.wait_for_actor("zombie")

    assert harness.finish(learner, 150) == 0, harness.logs()
    assert harness.finish(zombie, 15) == 0 and harness.finish(other, 15) == 0, harness.logs()
    assert harness.summary()["num_groups_trained"] == NUM_STEPS * 8
    assert harness.summary()["num_actor_restarts"] == 0
