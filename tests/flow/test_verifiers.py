"""A taskset of the package verifiers trains: `make verifiers` installs it, in an environment of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.flow.processes import ROOT, RunHarness
from tests.flow.test_lora_commands import command

pytestmark = [pytest.mark.flow, pytest.mark.timeout(400)]
PYTHON = Path(os.environ.get("STREAMRL_VERIFIERS_PYTHON", ROOT / ".venv-verifiers/bin/python"))
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Words"]

class Word(vf.TaskData):
    answer: str

class Reversed(vf.Task[Word]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return sum(a == b for a, b in zip(trace.last_reply, self.data.answer)) / len(self.data.answer)

class Words(vf.Taskset[Reversed, vf.TasksetConfig]):
    def load(self):
        words = [a + b + c for a in "abcdefghij" for b in "abcdefghij" for c in "abcd"]
        return [Reversed(Word(prompt=word, answer=word[::-1]), self.config.task) for word in words]
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the package verifiers: make verifiers")
def test_a_taskset_of_fifteen_lines_trains(harness: RunHarness):
    (harness.path / "reversed_words.py").write_text(TASKSET)
    start = harness.path / "python"
    start.write_text(f'#!/bin/sh\nPYTHONPATH={harness.path} exec {PYTHON} "$@"\n')
    start.chmod(0o755)
    launched = harness.launch(
        "env.name=verifiers:reversed-words", f"env.options.python={start}",
        'env.options.agent.harness.id="null"', "env.options.agent.runtime.type=subprocess",
        "policy.tiny.num_warm_start_steps=0", "trainer.num_steps=3", "launch.num_actors=1", "eval.num_samples=0",
        "filter.zero_std=false", "env.step_timeout_s=200", "rollout.num_prompts_per_step=2",
        "rollout.num_responses_per_prompt=2", "actors.num_concurrent=4",
    )
    assert harness.finish(launched, 300) == 0, harness.logs()
    steps = [row for row in harness.metrics() if "rollout/num_turns/train" in row]
    assert len(steps) == 3
    assert steps[-1]["hub/num_episodes_failed"] == steps[-1]["hub/num_leases_lost"] == 0
    command(harness, "stream", str(harness.run_dir), "--outcome", "accepted", "--export", "answers.parquet")
    rows = pq.read_table(harness.path / "answers.parquet").to_pylist()
    for one in rows:  # the taskset's reward of what the engine sampled
        word, said = (re.sub(r"<\w+>", "", one[name]) for name in ("prompt", "answer"))
        assert one["reward"] == sum(a == b for a, b in zip(said, word[::-1], strict=False)) / len(word), one
    assert len([one for one in rows if one["trained_at"] is not None]) == 3 * 2 * 2
    assert not harness.leftovers()
