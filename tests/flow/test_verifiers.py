"""A taskset of the package verifiers trains: `make verifiers` installs it, in an environment of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.flow.processes import ROOT, RunHarness, free_port, wait_until
from tests.flow.test_lora_commands import command

PYTHON = Path(os.environ.get("STREAMRL_VERIFIERS_PYTHON", ROOT / ".venv-verifiers/bin/python"))
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Taskset"]

class Word(vf.TaskData):
    answer: str

class Length(vf.Task[Word]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return 1 / (1 + abs(len(self.data.answer) - len(trace.last_reply)))

class Taskset(vf.Taskset[Length, vf.TasksetConfig]):
    def load(self):
        words = [a + b + c for a in "abcdefghij" for b in "abcdefghij" for c in "abcd"]
        return [Length(Word(prompt=word, answer=word), self.config.task) for word in words]
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the package verifiers: make verifiers")
def test_a_taskset_of_fifteen_lines_trains_and_its_own_evaluation_scores_what_is_served(harness: RunHarness):
    (harness.path / "lengths.py").write_text(TASKSET)
    start = harness.path / "python"
    start.write_text(f'#!/bin/sh\nPYTHONPATH={harness.path} exec {PYTHON} "$@"\n')
    start.chmod(0o755)
    launched = harness.launch(
        "env.name=verifiers:lengths", f"env.options.python={start}",
        'env.options.agent.harness.id="null"', "env.options.agent.runtime.type=subprocess",
        "policy.tiny.num_warm_start_steps=0", "trainer.num_steps=3", "launch.num_actors=1", "eval.num_samples=0",
        "filter.zero_std=false", "env.step_timeout_s=200", "rollout.test.sampling.temperature=0",
        "rollout.num_prompts_per_step=2", "rollout.num_responses_per_prompt=2", "actors.num_concurrent=4",
    )
    assert harness.finish(launched, 300) == 0, harness.logs()
    steps = [row for row in harness.metrics() if "rollout/num_turns/train" in row]
    assert len(steps) == 3
    assert steps[-1]["hub/num_episodes_failed"] == steps[-1]["hub/num_leases_lost"] == 0
    command(harness, "stream", str(harness.run_dir), "--outcome", "accepted", "--export", "answers.parquet")
    rows = pq.read_table(harness.path / "answers.parquet").to_pylist()
    for one in rows:  # the taskset's reward of what the engine sampled
        word, said = (re.sub(r"<\w+>", "", one[name]) for name in ("prompt", "answer"))
        assert one["reward"] == 1 / (1 + abs(len(word) - len(said))), one
    assert len([one for one in rows if one["trained_at"] is not None]) == 3 * 2 * 2

    # `vf-eval` against `streamrl serve`, and `streamrl eval` of the run, over the same held-out tasks.
    (served,) = re.findall(r"avg@1 +([\d.]+)", command(harness, "eval", str(harness.run_dir), "eval.num_samples=8"))
    assert 0 < float(served) and _scored(harness) == pytest.approx(float(served), abs=5e-4)
    assert not harness.leftovers()


def _scored(harness: RunHarness) -> float:
    """The mean reward of verifiers' own command over the first eight of the last forty tasks."""
    port = free_port()
    server = harness.start("serve", [
        sys.executable, "-m", "streamrl.cli", "serve", str(harness.run_dir), "--port", str(port),
    ])
    wait_until(lambda: "serving" in (harness.path / "serve.log").read_text(), 60, "the server", harness.logs)
    agent = "--env.agent.harness.id null --env.agent.runtime.type subprocess".split()
    done = subprocess.run(
        [PYTHON.with_name("vf-eval"), "lengths", "--model", "policy", *agent, "--client.base-url",
         f"http://127.0.0.1:{port}/v1", "--sampling.temperature", "0", "--select.skip", "360", "-n", "8", "-c", "2",
         "--no-push", "--no-rich", "--output-dir", "evaluated"],
        cwd=harness.path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(harness.path), "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    server.terminate()
    assert server.wait(30) == 0
    (file,) = harness.path.glob("evaluated/*/traces.jsonl")
    rewards = [one["traces"][0]["rewards"]["found"]["score"] for one in map(json.loads, file.read_text().splitlines())]
    assert len(rewards) == 8
    return sum(rewards) / 8
