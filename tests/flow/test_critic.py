"""A critic in a real run: it learns first if told to, and a resumed run has it back."""

import json

import pytest

from tests.flow.processes import RunHarness

WITH_CRITIC = ("advantage.estimator=vtrace", "advantage.baseline=none", "advantage.whiten=batch")
MORE_METRICS = (
    "hub.heartbeat_s=0.2", "trust.audit_share=1", "loss.opsm_delta=0.01", "loss.zscore_bound=6",
    "loss.entropy_coef=0.001",
    "loss.anchor=recomputed", "loss.correction=decoupled_token_is", "advantage.rho_bar_ess_target=0.9",
    "objectives.components={reward:1,score:-1}", "eval.num_responses=2", "rollout.test.sampling.temperature=1",
    "eval.datasets={again: {num_samples: 3, num_responses: 1, sampling: {temperature: 0}}}", "eval.every_steps=2",
)
"""Modes that have metrics of their own and that no other launched run is in."""


@pytest.mark.parametrize("name", ["sao", "single_rollout"])
def test_single_answers_train_from_end_to_end(harness: RunHarness, name):
    words = ("trainer.num_steps=3", "rollout.num_prompts_per_step=32", "rollout.num_responses_per_prompt=1")
    run = harness.launch(f"algorithm={name}", *words)
    assert harness.finish(run, 120) == 0, harness.logs()
    harness.check_metric_keys()
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["policy/num_trajectories"] for row in rows] == [32] * 3
    assert [row["policy/num_groups"] for row in rows] == [32] * 3
    assert all(row["advantage/std"] > 0 for row in rows)


@pytest.mark.shows("critic.num_warmup_steps")
def test_only_the_critic_learns_in_its_warm_up_and_a_resumed_run_has_it_back(harness: RunHarness):
    first = harness.launch("trainer.num_steps=4", "critic.num_warmup_steps=2", "policy.scheduler.num_warmup_steps=1",
                           *WITH_CRITIC, *MORE_METRICS)
    assert harness.finish(first, 120) == 0, harness.logs()
    harness.check_metric_keys()
    rows = [row for row in harness.metrics() if "policy/lr" in row]
    assert [row["policy/lr"] > 0 for row in rows] == [False, False, True, True]
    rates = [row["policy/lr"] for row in rows]
    assert rates[3] == pytest.approx(2 * rates[2], rel=0.1), "its own warm-up begins when it is trained"
    assert all("critic/loss" in row for row in rows)
    evaluated = [json.loads(line) for line in (harness.run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert sorted((one["dataset"], one["version"]) for one in evaluated) == [
        (name, version) for name in ("", "again") for version in (0, 2, 4)
    ]
    assert all(one["sampled_by"] == [one["version"]] * 2 for one in evaluated), "answers of another version count"
    assert {len(one["scores"]) for one in evaluated if one["dataset"]} == {3}
    assert rows[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # values start at 0
    assert (harness.run_dir / "critic" / "value_head.safetensors").exists()

    again = harness.launch("trainer.num_steps=5", "checkpoint.resume=true", *WITH_CRITIC)
    assert harness.finish(again, 120) == 0, harness.logs()
    last = [row for row in harness.metrics() if "policy/lr" in row][-1]
    assert last["critic/explained_variance"] != 0.0
    assert "starts untrained" not in harness.logs()
