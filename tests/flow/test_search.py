"""A search of real runs: one finishes, one fails, one is pruned."""

import json
import sys

from streamrl.metrics.run_record import read_run
from tests.flow.processes import RunHarness


def test_a_search_of_three_runs_prunes_one_and_outlives_a_failed_one(harness: RunHarness):
    sweep = harness.path / "sweep"
    words = [word for word in harness.words("trainer.num_steps=12") if not word.startswith(("run.dir=", "hub.bind="))]
    launch = harness.start("launch", [
        sys.executable, "-m", "streamrl.cli", "launch", "-m", "hydra/sweeper=optuna", *words, f"sweep.dir={sweep}",
        "sweep.sampler=tests.fakes.samplers:listed_order", "policy.optimizer.lr=1e-3,-1,1e-4", "sweep.num_trials=3",
        "sweep.metric=policy/lr", "sweep.num_startup_trials=1", "launch.num_actors=1", "checkpoint.export_hf=false",
    ])

    assert harness.finish(launch, 240) == 1, harness.logs()  # one has failed
    runs = json.loads((sweep / "sweep.json").read_text())["runs"]
    assert [(run["run"].partition("-")[0], run["outcome"]) for run in runs] == [
        ("0", "finished"), ("2", "pruned"), ("1", "failed")
    ]
    assert 0 < runs[0]["value"] <= 1e-3 and runs[0]["steps"] == 12
    pruned = read_run(sweep / runs[1]["run"])
    assert pruned.summary.stopped.startswith("pruned at step ") and pruned.summary.steps < 12
    assert list((sweep / runs[1]["run"]).glob("ckpt-*")), "it can be resumed"
    assert "must be greater than 0" in (harness.path / "launch.log").read_text()
    assert not harness.leftovers()
