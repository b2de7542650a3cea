"""`make slurm`: a run and sweeps on a real slurmctld and slurmd of this machine; jobs are killed and queued again."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fakes.programs import SCORED_LEARNER, write_programs
from tests.flow.processes import SLOW, SMALL, wait_until
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
        wait_until(lambda: not cluster.jobs(), 300, "the end of all jobs", logs)
        text = (run_dir / "logs" / "learner-slurm.log").read_text()
        # Two tasks; one that starts again under another name, because its learner was away for long, may make it more.
        assert len(set(re.findall(r"actor (slurm-\S+) joined", text))) >= 2
        assert "resuming from" in text
    finally:
        cluster.close()


SWEEP = ("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=20", "sweep.dir=out")


def start_sweep(cluster: Cluster, here: Path, *words: str) -> subprocess.Popen[bytes]:
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    python_path = os.pathsep.join([str(here), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    with (here / "sweep.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "streamrl.cli", "launch", "-m", *SWEEP, *words], cwd=here, stdout=log, stderr=log,
            env={**cluster.environment, "PYTHONPATH": python_path},
        )


@pytest.mark.timeout(1200)  # Slurm lets a job that is queued again wait for two minutes
def test_a_sweep_of_four_runs_loses_none_when_jobs_and_the_sweep_itself_are_killed(tmp_path):
    assert not missing(), missing()
    cluster = Cluster(tmp_path / "cluster")

    def runs() -> list[Path]:
        return sorted(path.parent for path in tmp_path.glob("out/*/submitted.json"))

    def job(run: Path) -> str:
        return str(json.loads((run / "submitted.json").read_text())["id"])

    def epochs(num: int) -> list[str]:
        return [(run / "EPOCH").read_text().strip() for run in runs()[:num] if (run / "EPOCH").exists()]

    def logs() -> str:
        found = [tmp_path / "sweep.log", *tmp_path.glob("out/*/slurm/*.*"), *tmp_path.glob("out/*/logs/*.log")]
        return cluster.logs() + "".join(f"--- {one}\n{one.read_text(errors='replace')[-2000:]}" for one in found)

    words = [*SMALL, *SLOW, "trainer.num_steps=16", "checkpoint.every_steps=2", "staleness.eta=0,1", "run.seed=1,2",
             "launch.num_actors=1", "hydra.launcher.array_parallelism=2", "hydra.launcher.cpus_per_task=2"]
    sweep = start_sweep(cluster, tmp_path, *words)
    try:
        wait_until(lambda: len(runs()) == 2, 60, "two jobs", logs)
        killed, preempted = (job(run) for run in runs())
        wait_until((runs()[0] / "LATEST").exists, 240, "a checkpoint", logs)
        for process in psutil.process_iter(["cmdline"]):  # the job is lost
            words_of = process.info["cmdline"] or [""]
            if words_of[0] == sys.executable and str(runs()[0] / "slurm") in words_of:
                process.kill()
        wait_until((runs()[1] / "LATEST").exists, 240, "a checkpoint", logs)
        cluster.command("scancel", "--signal=USR2", preempted)  # its time is nearly over
        wait_until(lambda: epochs(2) == ["2", "2"], 240, "the second start of both", logs)
        assert job(runs()[0]) != killed and job(runs()[1]) == preempted
        sweep.kill()
        sweep.wait()
        sweep = start_sweep(cluster, tmp_path, *words, "checkpoint.resume=true")
        assert sweep.wait(400) == 0, logs()

        ranked = json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]
        assert [(one["outcome"], one["steps"]) for one in ranked] == [("finished", 16)] * 4
        assert all("resuming from" in (run / "logs" / "learner.log").read_text() for run in runs()[:2])
        printed = (tmp_path / "sweep.log").read_text()
        assert f"Slurm job {killed} left no result" in printed and printed.count("is submitted as Slurm job") == 4
        wait_until(lambda: not cluster.jobs(), 60, "an empty queue", logs)
    finally:
        sweep.kill()
        cluster.close()


def test_a_search_prunes_jobs_and_ctrl_c_takes_them_out_of_the_queue(tmp_path):
    assert not missing(), missing()
    write_programs(tmp_path, SCORED_LEARNER)
    (tmp_path / "hold-below").write_text("0.1")
    cluster = Cluster(tmp_path / "cluster")
    words = ["experiment=quickstart", "launch.num_actors=0", "policy.optimizer.lr=0.5,0.01,0.7,0.02",
             "sweep.sampler=tests.fakes.samplers:listed_order", "sweep.num_startup_trials=1", "sweep.num_trials=4"]
    sweep = start_sweep(cluster, tmp_path, *words, "sweep.num_parallel=1")
    try:
        assert sweep.wait(240) == 0, (tmp_path / "sweep.log").read_text() + cluster.logs()
        ranked = json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]
        assert sorted(one["outcome"] for one in ranked) == ["finished", "finished", "pruned", "pruned"]

        (tmp_path / "hold-below").write_text("100")
        sweep = start_sweep(cluster, tmp_path, *words[:2], "policy.optimizer.lr=0.1,0.2,0.3,0.4", "sweep.dir=other",
                            "hydra.launcher.cpus_per_task=4")  # of eight: two wait
        wait_until(lambda: len(list(tmp_path.glob("other/*/environment.json"))) == 2, 60, "two runs", cluster.logs)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(90) == 130
        wait_until(lambda: not cluster.jobs(), 30, "an empty queue", cluster.logs)  # none went on, and none waits
    finally:
        sweep.kill()
        cluster.close()
