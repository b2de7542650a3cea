"""The quickstart where nothing is that only Linux has: a fake of such a system, in every process of the run."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.fakes import without_linux

WORDS = ("run.dir=run", "trainer.num_steps=24", "rollout.num_prompts_per_step=8", "launch.num_actors=1",
         "eval.num_samples=100", "eval.every_steps=12", "staleness.eta=0")
"""Less only of what costs time; without any lag the same seed gives the same answers, but for sums in other orders."""


@pytest.mark.timeout(480)
def test_the_quickstart_scores_the_same_without_what_only_linux_has(tmp_path, python_env):
    scores: dict[str, list[float]] = {}
    for system in ("linux", "other"):
        here = tmp_path / system
        here.mkdir()
        env = {**python_env, "PYTHONPATH": f"{here}{os.pathsep}{python_env['PYTHONPATH']}"}
        if system == "other":
            shutil.copy(without_linux.__file__, here / "sitecustomize.py")
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "launch", "experiment=quickstart", *WORDS], env=env, cwd=here,
            capture_output=True, text=True, timeout=220,
        )
        logs = {path.name: path.read_text() for path in (here / "run").rglob("*.log")}
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:], logs)
        assert json.loads((here / "run" / "summary.json").read_text())["steps"] == 24
        texts = [done.stdout, done.stderr, *logs.values()]
        assert logs and not [text for text in texts if "Traceback" in text]
        # One line says what is missing.
        assert sum(text.count("weights go through the run folder") for text in logs.values()) == (system == "other")
        rows = map(json.loads, (here / "run" / "metrics.jsonl").read_text().splitlines())
        scores[system] = [row["eval/score"] for row in rows if "eval/score" in row]
    assert len(scores["linux"]) == 3 and scores["linux"][-1] > scores["linux"][0], scores
    assert scores["other"] == pytest.approx(scores["linux"], abs=0.03)  # equal, as a rule
