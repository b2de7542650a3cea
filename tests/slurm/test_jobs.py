"""`streamrl slurm`: scripts that bash accepts, and that a fake sbatch runs as processes to the end of a run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from learner.setup.hub import same_address
from streamrl.errors import ConfigError
from streamrl.transport.keys import KeyDirectory, join_words
from streamrl.verbs.slurm import slurm
from tests.flow.processes import SMALL, wait_until

FAKE = Path(__file__).parent / "fake_sbatch.py"


def scripts(path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Path]:
    monkeypatch.chdir(path)
    assert slurm([*words, f"run.dir={path}/run", "experiment=quickstart"]) == 0
    return sorted((path / "run" / "slurm").iterdir())


def test_what_is_written_is_bash_with_the_options_that_were_given(tmp_path, monkeypatch, capsys):
    actors, learner = scripts(
        tmp_path, monkeypatch, "--actors=3", "--learner-options=--gres=gpu:2 --time=1:00:00", "--setup=source my env",
        "launch.num_learner_ranks=2",
    )
    for one in (actors, learner):
        subprocess.run(["bash", "-n", str(one)], check=True, timeout=30)
        assert "\nsource my env\n" in one.read_text()
        assert f"sbatch {one}" in capsys.readouterr().out or one is learner
    assert "--gres=gpu:2\n#SBATCH --time=1:00:00" in learner.read_text()
    assert "--nproc_per_node=2" in learner.read_text() and "--array=0-2" in actors.read_text()
    assert (tmp_path / "keys" / "actors" / "slurm.key").exists()
    assert set(KeyDirectory(tmp_path / "keys").allowed().values()) == {"slurm"}


@pytest.mark.parametrize("words", [["--actors=0"], ["hub.bind=tcp://127.0.0.1:1"]])
def test_what_cannot_work_is_refused(tmp_path, monkeypatch, words):
    with pytest.raises(ConfigError):
        scripts(tmp_path, monkeypatch, *words)


def test_without_sbatch_the_command_to_type_elsewhere_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not installed here: run `sbatch"):
        scripts(tmp_path, monkeypatch, "--submit")


def test_a_run_directory_gives_the_address(tmp_path):
    (tmp_path / "hub.json").write_text('{"connect": "tcp://node7:5601"}')
    assert join_words([str(tmp_path), "actors.engine=vllm"]) == ["connect=tcp://node7:5601", "actors.engine=vllm"]


def test_a_resumed_learner_on_another_node_takes_the_port_but_not_the_host(tmp_path):
    (tmp_path / "hub.json").write_text('{"connect": "tcp://node7:40001"}')
    assert same_address("tcp://0.0.0.0:0", tmp_path, resume=True) == "tcp://0.0.0.0:40001"
    assert same_address("tcp://127.0.0.1:0", tmp_path, resume=True) == "tcp://127.0.0.1:40001"
    assert same_address("tcp://0.0.0.0:7", tmp_path, resume=True) == "tcp://0.0.0.0:7"


@pytest.mark.flow
@pytest.mark.timeout(300)
def test_a_submitted_run_is_trained_by_both_jobs_to_its_end(tmp_path):
    (tmp_path / "sbatch").symlink_to(FAKE)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "127.0.0.1"}
    words = [*SMALL, f"run.dir={tmp_path}/run", "trainer.num_steps=3"]
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", "slurm", "--submit", "--actors=1", *words], cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 0, done.stderr
    started = (tmp_path / "processes").read_text()
    numbers = [int(line.split()[0]) for line in started.splitlines()]
    logs = sorted((tmp_path / "run" / "logs").glob("*-slurm.log"))
    try:
        assert "--dependency=after:1" in started and len(numbers) == 2
        summary = tmp_path / "run" / "summary.json"
        wait_until(summary.exists, 200, "the end of the run", lambda: "\n".join(one.read_text() for one in logs))
        assert json.loads(summary.read_text())["steps"] == 3
        wait_until(lambda: not any(map(alive, numbers)), 60, "the end of both jobs")
        assert re.search(r"actor slurm-\S+ joined", logs[1].read_text()), "it joins with the key of these runs"
    finally:
        for number in filter(alive, numbers):
            os.killpg(number, signal.SIGKILL)


def alive(number: int) -> bool:
    """Whether a process whose parent has ended still runs."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
