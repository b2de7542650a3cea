"""A data file and a reward of three lines, launched as the README says."""

import json

from tests.flow.processes import RunHarness

REWARD = """
def reward_fn(messages, answer):
    said = messages[-1]["content"]
    return float("nan") if said.endswith("7") else float(said == answer)
"""


def test_a_file_and_a_reward_train_for_an_epoch_past_long_prompts_and_bad_values(harness: RunHarness):
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    long = [{"question": f"What is {a} plus 1, if you please?", "answer": str(a + 1)} for a in range(5)]
    (harness.path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*sums, *long)))
    (harness.path / "reward.py").write_text(REWARD)

    launch = harness.launch(
        f"env.path={harness.path / 'reward.py'}", f"data.path={harness.path / 'train.jsonl'}", "trainer.num_epochs=0.5",
        "rollout.num_prompts_per_step=8", "rollout.max_prompt_tokens=20", "policy.tiny.num_warm_start_steps=0",
        "filter.zero_std=false", "hub.num_max_attempts=20",
    )

    assert harness.finish(launch, 150) == 0, harness.logs()
    printed, summary = (harness.path / "launch.log").read_text(), harness.summary()
    assert "train.jsonl: 85 records to train on, 20 held out" in printed
    assert summary["steps"] == 6  # 42.5 prompts in batches of 8
    assert "reward_fn returned nan: a reward must be a finite number" in printed
    assert "tokens, rollout.max_prompt_tokens is 20" in printed
    rewards = [json.loads(line).get("reward/mean") for line in (harness.run_dir / "metrics.jsonl").open()]
    assert rewards and all(value is None or 0.0 <= value <= 1.0 for value in rewards), "no NaN has reached the learner"
