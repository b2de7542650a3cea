"""`make slurm`: a run on a real slurmctld and slurmd of this machine, whose learner is put into the queue again."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.flow.processes import SMALL, wait_until
from tests.slurm.cluster import Cluster, missing

ASKED = "STREAMRL_SLURM"
pytestmark = [
    pytest.mark.flow, pytest.mark.timeout(600),
    pytest.mark.skipif(ASKED not in os.environ, reason="a cluster is started by `make slurm` only"),
]


def test_a_run_whose_learner_is_requeued_reaches_its_end(tmp_path):
    assert not missing(), missing()
    cluster = Cluster(tmp_path / "cluster")
    run_dir = tmp_path / "run"

    def logs() -> str:
        return cluster.logs() + "".join(f"--- {one}\n{one.read_text()[-3000:]}" for one in run_dir.glob("logs/*.log"))

    try:
        words = [*SMALL, f"run.dir={run_dir}", "run.name=demo", "trainer.num_steps=12", "checkpoint.every_steps=2"]
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "slurm", "--submit", "--actors=2", *words], cwd=tmp_path,
            env={**cluster.environment, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=120,
        )
        assert done.returncode == 0, done.stderr
        wait_until((run_dir / "LATEST").exists, 240, "a checkpoint", logs)
        number = cluster.command("squeue", "-h", "--name=demo-learner", "-o", "%i").strip()
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], env=cluster.environment, check=True, timeout=60)
        wait_until(lambda: (run_dir / "EPOCH").read_text().strip() == "2", 240, "the second start", logs)
        summary = run_dir / "summary.json"
        wait_until(lambda: summary.exists() and json.loads(summary.read_text())["steps"] == 12, 240, "the end", logs)
        wait_until(lambda: not cluster.jobs(), 120, "the end of all jobs", logs)
        text = (run_dir / "logs" / "learner-slurm.log").read_text()
        # Two tasks; one that starts again under another name, because its learner was away for long, may make it more.
        assert len(set(re.findall(r"actor (slurm-\S+) joined", text))) >= 2
        assert "resuming from" in text
    finally:
        cluster.close()
