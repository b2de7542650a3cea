"""Several learner ranks, and several runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamrl.metrics.samples import read_samples
from tests.flow.processes import RunHarness

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]


def test_two_fsdp2_ranks_under_torchrun_train(harness: RunHarness):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "learner"]
    learner = harness.start("learner", [*torchrun, *harness.words("trainer.num_steps=8", "checkpoint.every_steps=4")])
    actor = harness.actor("a0")

    assert harness.finish(learner, 150) == 0, harness.logs()
    assert harness.finish(actor, 15) == 0
    assert harness.summary()["num_groups_trained"] == 64
    shards = sorted(path.name for path in (harness.run_dir / "ckpt-00000008").glob("*.safetensors"))
    assert len(shards) == 2, "each rank writes its own shard"
    trained = [one for one in read_samples(harness.run_dir) if one.kind == "train"]
    assert len(trained) == 32 and {one.step for one in trained} == set(range(1, 9)), "drawn from both ranks' groups"


def test_a_multirun_makes_a_directory_a_job_and_a_comparison(harness: RunHarness):
    sweep = harness.path / "sweep"
    words = [word for word in harness.words("trainer.num_steps=3") if not word.startswith(("run.dir=", "hub.bind="))]
    launch = harness.start("launch", [
        sys.executable, "-m", "streamrl.cli", "launch", "-m", *words, "staleness.eta=0,2",
        "algorithm=stream_default,dr_grpo", f"hydra.sweep.dir={sweep}",
    ])

    assert harness.finish(launch, 240) == 0, harness.logs()
    jobs = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert len(jobs) == 4 and all((job / "summary.json").exists() for job in jobs)
    assert (sweep / "comparison.html").exists()
    printed = (harness.path / "launch.log").read_text()
    assert printed.count("staleness.eta=0") >= 2 and "algorithm=dr_grpo" in printed
    synchronous = [job for job in jobs if "eta-0" in job.name]
    assert all('"lag_max": 0' in Path(job / "summary.json").read_text() for job in synchronous)
