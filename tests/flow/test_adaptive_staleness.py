"""The staleness control in real runs: the learner measures, decides and tells; the hub obeys."""

from typing import Any

import pytest

from tests.flow.processes import RunHarness

ADAPTIVE = (
    "staleness.adaptive.enabled=true", "staleness.adaptive.half_life_steps=5", "policy.scheduler.ess_rule=sqrt",
    "eval.num_samples=0", "checkpoint.every_steps=0", "launch.num_actors=1",
)
FORCED = ("staleness.force=3", "shadow.algorithms=[grpo,vespo]")


def steps_of(harness: RunHarness) -> list[dict[str, Any]]:
    return [row for row in harness.metrics() if "policy/loss" in row]


def test_a_step_that_is_far_too_large_shrinks_itself_and_the_lead_and_nothing_is_thrown_away(harness: RunHarness):
    launch = harness.launch(
        *ADAPTIVE, "trainer.num_steps=14", "staleness.eta=4", "policy.optimizer.lr=3e-2", "loss.veto_low=null",
        "loss.veto_high=null",
    )

    assert harness.finish(launch, 250) == 0, harness.logs()
    rows = steps_of(harness)
    assert max(row["control/mode"] for row in rows) >= 1 and min(row["control/eta"] for row in rows) <= 2
    assert min(row["lr/scale"] for row in rows) < 0.9
    assert all(row["policy/lr"] == pytest.approx(3e-2 * row["lr/scale"]) for row in rows)
    assert min(row["hub/eta"] for row in rows) <= 2
    assert "staleness control: normal -> cautious" in (harness.run_dir / "logs" / "learner.log").read_text()
    assert harness.summary()["num_lag_violations"] == 0 and rows[-1]["hub/num_groups_stale"] == 0


def test_with_nothing_to_see_versions_are_published_seldom_and_the_last_one_always(harness: RunHarness):
    launch = harness.launch(
        "publish.when=drift", "trainer.num_steps=13", "staleness.eta=4", "policy.optimizer.lr=1e-9",
        "checkpoint.every_steps=0", "launch.num_actors=1", "eval.every_steps=7",
    )

    assert harness.finish(launch, 250) == 0, harness.logs()
    rows, summary = steps_of(harness), harness.summary()
    assert rows[-1]["hub/num_installs"] <= 6  # of versions 0, 3, 6, 7 for the evaluation, 10, 13
    evaluated = [row["eval/version"] for row in harness.metrics() if "eval/version" in row]
    assert evaluated == [0, 7, 13], "an evaluation waits for a version that was never published"
    assert summary["num_lag_violations"] == 0 and summary["lag_max"] <= 5


@pytest.mark.shows("staleness.force")
def test_a_forced_lag_is_the_lag_of_every_token_in_the_metrics(harness: RunHarness):
    launch = harness.launch(*FORCED, "trainer.num_steps=8", "checkpoint.every_steps=0")

    assert harness.finish(launch, 250) == 0, harness.logs()
    rows = steps_of(harness)
    assert [row["lag/token_mean"] for row in rows] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert [row["lag/head_max"] for row in rows] == [0, 1, 2, 3, 3, 3, 3, 3]
    harness.check_metric_keys()
    assert [list(row["shadow/vespo/cosine_by_lag"]) for row in rows] == [[str(lag)] for lag in (0, 1, 2, 2, 2, 2, 2, 2)]
    assert rows[-1]["hub/eta"] == 3 and harness.summary()["num_lag_violations"] == 0


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("mask_old_tokens", ("staleness.max_lag=3", "staleness.num_lookahead_groups=32")),
        ("reweight", ("staleness.max_lag=0",)),
    ],
)
def test_each_mode_trains_and_says_what_it_did(harness: RunHarness, mode: str, words: tuple[str, ...]):
    launch = harness.launch(
        f"staleness.mode={mode}", *words, "staleness.eta=3", "trainer.num_steps=9", "eval.num_samples=0",
        "checkpoint.every_steps=0", "launch.num_actors=1", "actors.num_concurrent=192", "hub.heartbeat_s=0.2",
    )

    assert harness.finish(launch, 250) == 0, harness.logs()
    harness.check_metric_keys()
    rows, summary = steps_of(harness), harness.summary()
    assert len(rows) == 9 and summary["num_lag_violations"] == 0
    assert summary["lag_max"] <= {"mask_old_tokens": 3, "reweight": 4}[mode]
    assert max(row["lag/head_max"] for row in rows) >= 2, "nothing was old enough to make a difference"
    weights = [row["lag/weight"] for row in rows if "lag/weight" in row]
    assert (mode == "reweight") == bool(weights) and all(weight <= 1.0 for weight in weights)
    if mode == "reweight":
        assert min(weights) < 0.6
    if mode != "mask_old_tokens":
        assert rows[-1]["hub/num_groups_stale"] == 0
