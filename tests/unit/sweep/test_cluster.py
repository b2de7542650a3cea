"""Sweeps whose runs are jobs of submitit on this machine, with a small program in place of the learner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.launch import EXIT_INTERRUPTED
from streamrl.metrics.run_record import read_run
from streamrl.named_code import sign
from streamrl.processes import host_id, process_state
from streamrl.sweep import cluster
from streamrl.sweep.sweep import launch_sweep, num_at_once
from tests.flow.processes import wait_until
from tests.unit.config.setting_harness import config_of
from tests.unit.sweep.test_sweep import LISTED, QUICK, ranking

pytestmark = pytest.mark.timeout(180)
pytest.importorskip("submitit", reason="the extra slurm is not installed")
LOCAL = (*QUICK, "sweep.launcher=submitit_local", "sweep.num_parallel=2")


def jobs(here: Path) -> dict[str, int]:
    """Run -> the process of its job."""
    return {path.parent.name: int(json.loads(path.read_text())["id"]) for path in here.glob("out/*/submitted.json")}


def held(here: Path, *words: str) -> subprocess.Popen[bytes]:
    """A sweep of two jobs that both go on until the file `hold-below` is gone."""
    (here / "hold-below").write_text("100")
    with (here / "sweep.log").open("w") as log:
        sweep = subprocess.Popen([sys.executable, "-m", "streamrl.cli", "launch", "-m", *LOCAL, *words],
                                 stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    wait_until(lambda: len(list(here.glob("out/*/environment.json"))) == 2, 60, "two runs",
               (here / "sweep.log").read_text)
    return sweep


@pytest.mark.shows("sweep.launcher", "sweep.launcher_options")
def test_jobs_of_submitit_are_ranked_and_a_failed_one_has_its_reason(here, capfd):
    setup = "sweep.launcher_options.setup=['export CUDA_VISIBLE_DEVICES=7']"
    assert launch_sweep([*LOCAL, setup, "policy.optimizer.lr=0.25,13.0,0.5"]) == 1

    assert ranking(here) == [("0.5", "finished", 10.0), ("0.25", "finished", 5.0), ("13.0", "failed", None)]
    printed = capfd.readouterr().out
    assert "job 1 failed: status 1: RuntimeError: the reason of the failure" in printed
    assert len(jobs(here)) == 3 and all(f"process {number}" in printed for number in jobs(here).values())
    environment = json.loads((here / "out" / "2-policy.optimizer.lr-0.5" / "environment.json").read_text())
    assert environment["CUDA_VISIBLE_DEVICES"] == "7" and environment["OMP_NUM_THREADS"]


def test_a_search_prunes_a_job_that_is_behind(here):
    (here / "hold-below").write_text("0.1")
    assert launch_sweep([*LOCAL, LISTED, "policy.optimizer.lr=0.5,0.01,0.7", "sweep.num_trials=3",
                         "sweep.num_startup_trials=1", "sweep.num_parallel=1"]) == 0
    assert [outcome for _, outcome, _ in ranking(here)] == ["finished", "finished", "pruned"]
    [pruned] = here.glob("out/1-*")
    assert read_run(pruned).summary.stopped == "pruned at step 10"


def test_jobs_outlive_a_killed_sweep_and_the_next_one_finds_them(here, capfd):
    sweep = held(here, "policy.optimizer.lr=0.5,0.25")
    sweep.kill()
    sweep.wait()
    before = jobs(here)

    threading.Timer(1.0, (here / "hold-below").unlink).start()
    assert launch_sweep([*LOCAL, "policy.optimizer.lr=0.5,0.25", "checkpoint.resume=true"]) == 0
    assert jobs(here) == before
    printed = capfd.readouterr().out
    assert all(f"goes on as process {number}" in printed for number in before.values())
    assert [path.read_text().count("run directory") for path in here.glob("out/*/logs/launch.log")] == [1, 1]


def test_a_job_that_is_lost_is_submitted_again_and_goes_on_under_its_number(here, monkeypatch, capfd):
    monkeypatch.setattr(cluster, "LATE_S", 0.5)
    (here / "hold-below").write_text("0.3")

    def kill() -> None:
        wait_until(lambda: len(list(here.glob("out/1-*/environment.json"))) == 1, 60, "the run to kill")
        (here / "hold-below").unlink()
        number = jobs(here)["1-policy.optimizer.lr-0.25"]
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        for one in (number, *map(int, children)):
            os.kill(one, signal.SIGKILL)

    (here / "out").mkdir()
    killer = threading.Thread(target=kill)
    killer.start()
    assert launch_sweep([*LOCAL, "policy.optimizer.lr=0.5,0.25"]) == 0
    killer.join()
    assert ranking(here) == [("0.5", "finished", 10.0), ("0.25", "finished", 5.0)]
    assert "job 1 goes on as process" in capfd.readouterr().out


def test_ctrl_c_stops_the_jobs_in_order_and_the_sweep_goes_on_later(here):
    sweep = held(here, "policy.optimizer.lr=0.5,0.25")
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does
    assert sweep.wait(60) == EXIT_INTERRUPTED
    assert [outcome for _, outcome, _ in ranking(here)] == ["unfinished", "unfinished"]
    wait_until(lambda: all(process_state(one) in ("", "Z") for one in jobs(here).values()), 30, "the end of both jobs")

    (here / "hold-below").unlink()
    planted = [path.parent / "slurm" / "99_0_result.pkl" for path in here.glob("out/*/submitted.json")]
    for path in planted:
        path.write_bytes(b"cos\n_exit\n(I3\ntR.")  # ends the process that unpickles it
    assert launch_sweep([*LOCAL, "policy.optimizer.lr=0.5,0.25", "checkpoint.resume=true"]) == 0
    assert [outcome for _, outcome, _ in ranking(here)] == ["finished", "finished"]
    assert len(planted) == 2 and not any(path.exists() for path in planted)


@pytest.mark.parametrize("signed", [True, False])
def test_a_job_is_found_by_a_note_of_ones_own_alone(here, signed):
    note = here / "submitted.json"
    note.write_text(json.dumps({"cluster": "local", "id": str(os.getpid()), "host": host_id()}))
    if signed:
        sign(note)
    found = cluster.Cluster(config_of("sweep.launcher=submitit_local").sweep, "sweep").known(here)
    assert (found is not None) == signed


def test_slurm_gets_a_whole_grid_and_of_a_search_as_many_as_are_drawn_at_random():
    slurm = config_of("sweep.launcher=submitit_slurm").sweep
    assert (num_at_once(slurm, 12), num_at_once(slurm, 0)) == (12, 5)
    assert num_at_once(config_of("sweep.launcher=submitit_local").sweep, 12) == 1


@pytest.mark.parametrize(("word", "says"), [
    ("sweep.launcher_options.partition=gpu", "Unknown argument 'partition' for executor 'local'"),
    ("sweep.launcher_options.nodes=2", "is one job on one node"),
    ("sweep.launcher_options.timeout_min=soon", "expected type <class 'int'>"),
])
def test_parameters_that_a_job_cannot_have_are_refused_before_anything_is_made(here, word, says):
    with pytest.raises(ConfigError) as caught:
        launch_sweep([*LOCAL, "staleness.eta=0,1", word])
    assert says in str(caught.value) and not (here / "out").exists()


def test_without_slurm_the_launcher_is_refused(here, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(ConfigError, match='Could not detect "srun"'):
        launch_sweep([*QUICK, "staleness.eta=0,1", "sweep.launcher=submitit_slurm"])
    with pytest.raises(ConfigError, match="is of submitit: add hydra/launcher=submitit_slurm"):
        launch_sweep([*QUICK, "staleness.eta=0,1", "sweep.launcher_options.timeout_min=9"])
