"""A policy that answers with hostile text is trained on: nothing of it runs, nothing stalls, nothing is paid."""

import string

import pytest

from learner.model.tiny import make_tiny_model
from streamrl.metrics.rows import Rows
from tests.flow.hostile_policy import FOLDER
from tests.flow.processes import RunHarness

NUM_STEPS = 5
TOKENS = 1500


@pytest.mark.parametrize(
    "words",
    [
        ["env.name=countdown"],
        ["env.name=reasoning_gym.countdown", "env.options.answer_format=text"],
        ["env.name=reasoning_gym.spiral_matrix", "env.options.answer_format=tag"],  # its scorer calls eval
    ],
    ids=["countdown", "reasoning_gym.countdown", "spiral_matrix"],
)
def test_a_hostile_policy_marks_nothing_stalls_nothing_and_earns_nothing(words, harness: RunHarness, monkeypatch):
    pytest.importorskip("reasoning_gym")
    marked = harness.path / "marks"
    marked.mkdir()
    monkeypatch.setenv(FOLDER, str(marked))
    model = make_tiny_model(harness.path / "model", characters=string.printable, max_positions=2 * TOKENS)
    launch = harness.launch(
        *words, f"policy.model_path={model}", "actors.engine=tests.flow.hostile_policy:engine", "launch.num_actors=1",
        f"trainer.num_steps={NUM_STEPS}", f"rollout.max_prompt_tokens={TOKENS}", "rollout.num_prompts_per_step=2",
        "rollout.train.sampling.max_new_tokens=400", "data.apply_chat_template=false", "eval.num_samples=2",
    )

    assert harness.finish(launch, 400) == 0, harness.logs()
    rows = harness.metrics()
    assert harness.summary()["steps"] == NUM_STEPS and harness.summary()["num_episodes_failed"] == 0
    assert set(Rows(rows).values("reward/mean")) == set(Rows(rows).values("reward/std")) == {0.0}
    assert list(marked.iterdir()) == [] and harness.summary()["num_actor_restarts"] == 0
