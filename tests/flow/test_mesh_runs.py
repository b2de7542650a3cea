"""Launched runs of four learner ranks in each layout of the mesh, resumed from their checkpoints."""

import pytest

from tests.flow.processes import RunHarness

LONG = (  # longer than what one rank may hold, by a prompt and more
    "rollout.max_prompt_tokens=16", "rollout.train.sampling.max_new_tokens=32", "learner.max_tokens_per_device=24",
    "rollout.train.sampling.ignore_eos=true",
)


@pytest.mark.parametrize(
    "axes", [("learner.mesh.replicate=2",), ("learner.mesh.tensor=2",), ("learner.mesh.context=2", *LONG)],
    ids=lambda axes: axes[0],
)
def test_a_run_trains_and_resumes_in_its_layout_and_in_another(harness: RunHarness, axes):
    words = ("launch.num_learner_ranks=4", "launch.num_actors=1", "policy.tiny.num_warm_start_steps=20")
    for num_steps, more in ((2, axes), (4, (*axes, "checkpoint.resume=true")), (5, ("checkpoint.resume=true",))):
        launched = harness.launch(*words, f"trainer.num_steps={num_steps}", *more)
        assert harness.finish(launched, 120) == 0, harness.logs()
    versions = [row["run/version"] for row in harness.metrics() if "policy/loss" in row]
    assert versions == list(range(1, 6)) and harness.summary()["num_lag_violations"] == 0
    assert len(list((harness.run_dir / "ckpt-00000004").glob("*.safetensors"))) == 4
    assert harness.leftovers() == []
