"""`streamrl eval` and `streamrl chat` on a real tiny checkpoint, as processes and in this one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.evaluate import Progress, evaluate, summary, text_of
from actors.local_policy import find_model, local_config, open_policy
from envs.registry import task_of
from learner.model.tiny import prepare_tiny_model
from streamrl.config.load import load_config
from streamrl.errors import ConfigError

ROOT = Path(__file__).parents[3]
WORDS = ["experiment=quickstart", "eval.num_samples=3", "actors.num_threads=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random model that knows the letters of the quickstart."""
    folder = tmp_path_factory.mktemp("models")
    return prepare_tiny_model(
        folder, task_of(load_config(["experiment=quickstart"])), hidden_size=16, num_layers=1, num_heads=2,
        num_warm_start_steps=0, warm_start_lr=1e-3, stop_at=0.5, seed=0, num_threads=1, progress=print,
        max_positions=1024,
    )  # fmt: skip


def answers_of(checkpoint: Path, tmp_path: Path, *words: str, task=None):
    """(answers, their lines in the file, the summary)."""
    config = local_config(str(checkpoint), [*WORDS, *words])
    task = task or task_of(config)

    async def run():
        policy = await open_policy(config)
        try:
            with (tmp_path / "out.jsonl").open("w") as out:
                return await evaluate(config, policy, task, out, Progress(3))
        finally:
            await policy.engine.close()

    answers = asyncio.run(run())
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    return answers, lines, summary(config, task, answers)


def test_every_prompt_is_answered_as_often_as_asked_and_written(checkpoint, tmp_path):
    words = ("eval.num_responses=2", "rollout.test.sampling.temperature=1")
    answers, lines, result = answers_of(checkpoint, tmp_path, *words)
    places = sorted((line["prompt_index"], line["response"]) for line in lines)
    assert places == [(i, r) for i in range(3) for r in (0, 1)]
    by_prompt = {line["prompt_index"]: line["record"]["prompt"] for line in lines}
    assert by_prompt == {i: task_of(load_config(WORDS)).record("test", i)["prompt"] for i in range(3)}
    assert set(result["estimates"]) == {"avg@2", "pass@1", "pass@2", "maj@2"}
    assert result["estimates"]["avg@2"][0] == pytest.approx(sum(line["score"] for line in lines) / 6)
    assert "3 prompts, 2 answers each" in text_of(result, tmp_path / "out.jsonl")
    again = answers_of(checkpoint, tmp_path, *words)[1]
    assert sorted(line["text"] for line in again) == sorted(line["text"] for line in lines)  # the same seeds


@pytest.mark.shows("eval.solved_score")
def test_what_counts_as_solved_is_set(checkpoint, tmp_path):
    words = ("eval.num_responses=2", "rollout.test.sampling.temperature=1")
    assert answers_of(checkpoint, tmp_path, *words, "eval.solved_score=0")[2]["estimates"]["pass@2"][0] == 1.0
    assert answers_of(checkpoint, tmp_path, *words, "eval.solved_score=2")[2]["estimates"]["pass@2"][0] == 0.0


def test_failing_rewards_are_counted_and_named(checkpoint, tmp_path):
    config = load_config(WORDS)
    task = task_of(config)
    task.reward = lambda record, completion: 1 / 0
    answers, lines, result = answers_of(checkpoint, tmp_path, task=task)
    assert (answers.num_failed, answers.rewards) == (3, [])
    assert "ZeroDivisionError" in lines[0]["failure"] and "ZeroDivisionError" in text_of(result, tmp_path)


def test_several_greedy_answers_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="rollout.test.sampling.temperature"):
        local_config(str(checkpoint), [*WORDS, "eval.num_responses=2"])


def test_what_is_no_model_says_what_it_is(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        find_model(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no config.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="no exported model.*checkpoint.resume=true"):
        find_model(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weights"):
        find_model(str(tmp_path))


def streamrl(*words: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamrl.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, input=stdin, timeout=100)


def test_the_commands_run_from_any_folder(checkpoint, tmp_path):
    done = streamrl("eval", str(checkpoint), *WORDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "avg@1" in done.stdout and (tmp_path / "evals/string.reverse-001.jsonl").exists()
    spoken = streamrl("chat", str(checkpoint), *WORDS, cwd=tmp_path, stdin="abc\n/new\nab\n/quit\n")
    assert spoken.returncode == 0, spoken.stderr
    assert len(spoken.stdout.splitlines()) == 2
    wrong = streamrl("eval", "nowhere", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.splitlines()[-1][:14]) == (2, "error: nowhere")
