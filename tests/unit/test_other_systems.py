"""The quickstart where nothing is that only Linux has: a fake of such a system, in every process of the run."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.fakes import without_linux


@pytest.mark.timeout(240)
def test_the_quickstart_runs_without_what_only_linux_has(tmp_path, python_env):
    shutil.copy(without_linux.__file__, tmp_path / "sitecustomize.py")
    env = {**python_env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{python_env['PYTHONPATH']}"}
    words = ("run.dir=run", "trainer.num_steps=3", "rollout.num_prompts_per_step=4", "launch.num_actors=1",
             "policy.tiny.num_warm_start_steps=20", "eval.num_samples=8")
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", "launch", "experiment=quickstart", *words], env=env, cwd=tmp_path,
        capture_output=True, text=True, timeout=200,
    )
    logs = {path.name: path.read_text() for path in (tmp_path / "run").rglob("*.log")}
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:], logs)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert logs and not [name for name, text in logs.items() if "Traceback" in text]
    assert sum(text.count("weights go through the run folder") for text in logs.values()) == 1
