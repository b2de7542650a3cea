"""Several learner ranks, and several runs."""

import json
import sys
from pathlib import Path

from streamrl.metrics.samples import read_samples
from tests.flow.processes import RunHarness, free_port


def test_two_fsdp2_ranks_under_torchrun_train_in_minibatches_and_epochs_inside_a_trust_region(harness: RunHarness):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "learner"]
    learner = harness.start("learner", [*torchrun, *harness.words(
        "trainer.num_steps=8", "checkpoint.every_steps=4", "algorithm=areal", "learner.num_minibatches=2",
        "learner.num_epochs=2", "publish.when=every_optimizer_step", "policy.optimizer.lr=3e-3",
        "loss.cap=1000",  # a truncated weight would count as clipped too
    )])
    actor = harness.actor("a0")

    assert harness.finish(learner, 150) == 0, harness.logs()
    assert harness.finish(actor, 15) == 0
    summary, rows = harness.summary(), [row for row in harness.metrics() if "policy/clip_fraction" in row]
    assert summary["num_groups_trained"] == 64 and summary["steps"] == 8 and summary["num_lag_violations"] == 0
    assert [row["run/version"] for row in rows] == [4.0 * step for step in range(1, 9)]  # optimizer steps
    assert max(row["policy/clip_fraction"] for row in rows) > 0.0, "no ratio reached the clip of a recomputed anchor"
    assert 3 <= max(row["lag/token_max"] for row in rows) <= summary["max_lag_bound"] == 4 * (2 + 1) + 3
    shards = sorted(path.name for path in (harness.run_dir / "ckpt-00000032").glob("*.safetensors"))
    assert len(shards) == 2, "each rank writes its own shard"
    trained = [one for one in read_samples(harness.run_dir) if one.kind == "train"]
    assert len(trained) == 32 and {one.step for one in trained} == set(range(1, 9)), "drawn from both ranks' groups"


def test_a_learner_on_two_machines_that_share_no_directory(harness: RunHarness):
    port, ranks = free_port(), []
    for rank in range(2):
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1",
            "--master_addr=127.0.0.1", f"--master_port={port}", "-m", "learner",
        ]
        words = [one for one in harness.words("trainer.num_steps=4", "checkpoint.every_steps=2")
                 if not one.startswith(("run.dir=", "policy.tiny.cache_dir="))]
        words += [f"run.dir={harness.path}/run-{rank}", f"policy.tiny.cache_dir={harness.path}/models-{rank}"]
        ranks.append(harness.start(f"learner-{rank}", [*torchrun, *words]))
    harness.run_dir = harness.path / "run-0"
    actor = harness.actor("a0")

    assert [harness.finish(one, 200) for one in ranks] == [0, 0], harness.logs()
    assert harness.finish(actor, 15) == 0
    assert harness.summary()["steps"] == 4
    assert len(list((harness.run_dir / "ckpt-00000004").glob("*.safetensors"))) == 2
    other = {path.name for path in (harness.path / "run-1").iterdir()}
    assert not other & {"ckpt-00000004", "hub.json", "LATEST", "run_id"}, other
    assert json.loads((harness.run_dir / "hub_settings.json").read_text())["rank_endpoint"].startswith("tcp://0.0.0.0")
    written = "".join(path.read_text(errors="replace") for path in harness.path.rglob("*.json"))
    assert "streamrl-key" not in written and "STREAMRL_RANK_KEYS" not in written


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
