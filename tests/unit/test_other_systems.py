"""The quickstart where nothing is that only Linux has: a fake of such a system, in every process of the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import without_linux

pytestmark = pytest.mark.timeout(240)


def test_the_quickstart_runs_without_what_only_linux_has(tmp_path, python_env):
    fake = tmp_path / "fake"
    fake.mkdir()
    shutil.copy(without_linux.__file__, fake / "sitecustomize.py")
    env = {**python_env, "PYTHONPATH": f"{fake}{os.pathsep}{python_env.get('PYTHONPATH', '')}"}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True,
                              timeout=200)

    seen = command("-c", "import os, pathlib; print(pathlib.Path('/proc').exists(), hasattr(os, 'fdatasync'))")
    assert seen.stdout.split() == ["False", "False"]

    done = command(
        "-m", "streamrl.cli", "launch", "experiment=quickstart", "run.dir=run", "trainer.num_steps=3",
        "rollout.num_prompts_per_step=4", "policy.tiny.num_warm_start_steps=20", "eval.num_samples=8",
        "launch.num_actors=1",
    )

    logs = {path.name: path.read_text() for path in Path(tmp_path, "run").rglob("*.log")}
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:], logs)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert logs and not [name for name, text in logs.items() if "Traceback" in text]
    assert sum(text.count("weights go through the run folder") for text in logs.values()) == 1
    status = command("-m", "streamrl.cli", "status", "run")
    assert status.returncode == 0 and "Traceback" not in status.stderr
