"""Actors come, go and die while the learner runs; it loses nothing and trains exactly what it should."""


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
