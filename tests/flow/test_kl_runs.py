"""KL, entropy, constraints and a teacher in real runs: two ranks, a moving reference, weights that move on."""

import pytest

from envs.registry import task_of
from learner.model.tiny import prepare_tiny_model
from streamrl.config.load import load_config
from tests.flow.processes import RunHarness

PULLED = (
    "kl.mode=reward_k1", "kl.coef=0.01", "kl.controller=doubling", "kl.options.target=1e-6", "kl.options.high=0.5",
    "reference.sync_every_steps=3", "entropy.adapt=clip_high", "entropy.target=9", "entropy.step=0.01",
    "constraint.entropy_min=9", "constraint.options.lr=1e-4", "launch.num_learner_ranks=2", "launch.num_actors=1",
    "checkpoint.every_steps=2", "eval.num_samples=0", "policy.optimizer.lr=1e-3", "hub.heartbeat_s=0.2",
    "rollout.train.sampling.top_p=0.95", "rollout.train.sampling.max_kept=8",
    "learner.gradient_cosine=true",
)

DISTILLED = (
    "algorithm=distill", "distill.teacher=elsewhere", "trainer.num_steps=4", "launch.num_learner_ranks=2",
    "launch.num_actors=1", "eval.num_samples=0", "policy.optimizer.lr=2e-3", "hub.heartbeat_s=0.2",
    "learner.num_epochs=2", "learner.stop_kl=1e-9",
)


def test_two_ranks_pull_toward_a_reference_that_follows_and_go_on_with_it_after_a_restart(harness: RunHarness):
    first = harness.launch(*PULLED, "trainer.num_steps=4")
    assert harness.finish(first, 200) == 0, harness.logs()
    second = harness.launch(*PULLED, "trainer.num_steps=7", "checkpoint.resume=true")
    assert harness.finish(second, 200) == 0, harness.logs()
    harness.check_metric_keys()

    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["run/version"] for row in rows] == list(range(1, 8))
    at_reference = [abs(row["kl/value"]) < 1e-7 for row in rows]
    assert at_reference == [True, False, False] * 2 + [True], "zero at the start and right after each sync"
    one_step, two_steps = rows[4]["kl/value"], rows[2]["kl/value"]
    assert one_step < two_steps / 2, "after the restart the reference is the synced one, not the start of the run"
    coefs, moved = [row["kl/coef"] for row in rows], [0.01]
    for row in rows[:-1]:
        factor = 2.0 if row["kl/value"] > 1.5e-6 else 0.5
        moved.append(min(0.5, max(1e-3, moved[-1] * factor)))
    assert coefs == pytest.approx(moved), "the second process takes up the weight where the first left it"
    assert [row["clip/high"] for row in rows] == pytest.approx([0.28 + 0.01 * step for step in range(7)])
    multipliers = [row["constraint/entropy"] for row in rows]
    assert multipliers[0] == 0.0 and multipliers == sorted(multipliers) and len(set(multipliers)) == 7


def test_two_ranks_distill_a_teacher_without_any_reward(harness: RunHarness):
    task = task_of(load_config(["experiment=quickstart"]))
    teacher = prepare_tiny_model(harness.path, task, num_warm_start_steps=40, stop_at=1.0, seed=5, max_positions=512)
    run = harness.launch(*DISTILLED, f"distill.teacher={teacher}")
    assert harness.finish(run, 200) == 0, harness.logs()
    harness.check_metric_keys()
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["run/version"] for row in rows] == [2, 4, 6, 8]
    assert rows[-1]["policy/num_steps_left_out"] == 1, "stale data are farther away than such a bound"
    assert all(0 < row["distill/kl"] < 5 and row["advantage/std"] > 0 and row["policy/grad_norm"] > 0 for row in rows)
