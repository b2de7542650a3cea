"""Actors come, go and die while the learner runs; it loses nothing and trains exactly what it should."""

from __future__ import annotations

import signal

import pytest

from tests.flow.processes import SLOW, Stage, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]
NUM_STEPS = 40


def test_actors_join_and_are_killed_while_training_goes_on(stage: Stage):
    learner = stage.learner(f"trainer.num_steps={NUM_STEPS}", "staleness.eta=2", "hub.dead_after_s=2", *SLOW)
    actors = {name: stage.actor(name) for name in ("a0", "a1")}
    stage.wait_for_version(2)

    actors["a2"] = stage.actor("a2")
    stage.wait_for_actor("a2")
    actors["a0"].kill()
    stage.wait_for_eviction("a0")
    wait_until(lambda: stage.counter("num_leases_reissued") >= 1, 20, "a reissued lease", stage.logs)

    assert stage.finish(learner, 150) == 0, stage.logs()
    assert stage.finish(actors["a1"], 15) == 0 and stage.finish(actors["a2"], 15) == 0, stage.logs()
    summary = stage.summary()
    assert summary["num_groups_trained"] == NUM_STEPS * 8
    assert summary["num_lag_violations"] == 0 and summary["lag_max"] <= summary["max_lag_bound"] == 3
    assert summary["num_leases_reissued"] >= 1
    assert "a2" in (stage.path / "learner.log").read_text() and stage.metrics()[-1]["hub/num_actors"] >= 1
    stage.close()
    assert stage.leftovers() == []


def test_an_actor_that_leaves_politely_hands_its_leases_back(stage: Stage):
    learner = stage.learner("trainer.num_steps=60")
    leaver, stayer = stage.actor("leaver"), stage.actor("stayer")
    stage.wait_for_actor("leaver")
    stage.wait_for_version(3)

    leaver.send_signal(signal.SIGTERM)

    assert stage.finish(leaver, 20) == 0, stage.logs()
    assert "left cleanly" in (stage.path / "leaver.log").read_text()
    assert stage.finish(learner, 120) == 0 and stage.finish(stayer, 15) == 0
    assert stage.summary()["num_groups_trained"] == 60 * 8
    assert stage.counter("num_evictions") == 0


def test_a_stopped_actor_that_comes_back_is_welcome_and_nothing_is_trained_twice(stage: Stage):
    learner = stage.learner(f"trainer.num_steps={NUM_STEPS}", "hub.dead_after_s=2", *SLOW)
    zombie, other = stage.actor("zombie"), stage.actor("other")
    stage.wait_for_actor("zombie")
    stage.wait_for_version(2)

    zombie.send_signal(signal.SIGSTOP)
    stage.wait_for_eviction("zombie")
    zombie.send_signal(signal.SIGCONT)
    stage.wait_for_actor("zombie")

    assert stage.finish(learner, 150) == 0, stage.logs()
    assert stage.finish(zombie, 15) == 0 and stage.finish(other, 15) == 0, stage.logs()
    assert stage.summary()["num_groups_trained"] == NUM_STEPS * 8
    assert stage.summary()["num_actor_restarts"] == 0
