"""Every task that `streamrl tasks` lists loads a record and tells right from wrong answers."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from envs.catalog import entries, lines
from envs.registry import REGISTERED, task_of
from envs.tasks.named import FORMATS
from streamrl.config.load import from_plain
from streamrl.environment import HasTarget, Step, Task
from streamrl.errors import StreamrlError

RECORDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": (
        {"question": "Two boxes of 21 eggs?", "answer": "2 * 21 = <<2*21=42>>42\n#### 42"}, "So it is 42", "41"
    ),
    "math": (
        {"problem": "What is $1/2$?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
        "\\boxed{0.5}", "\\boxed{2}",
    ),
    "code": (
        {"prompt": "Double a number.", "test_cases": {"inputs": ["2", "3"], "outputs": ["4", "6"]}},
        "```python\nprint(2 * int(input()))\n```", "```python\nprint(4)\n```",
    ),
}  # fmt: skip


def settings(*words: str) -> Any:
    return from_plain({}, ["policy.tiny.enabled=true", "reward.code.sandbox=limited", *words])


def score(task: Task, record: Any, answer: str) -> float:
    env = task.env()
    env.reset(record)
    step = env.step(answer)
    step = asyncio.run(step) if inspect.isawaitable(step) else step  # type: ignore[arg-type]
    assert isinstance(step, Step)
    return step.reward if step.score is None else step.score


def test_every_task_and_format_is_listed() -> None:
    names = [one.name for one in entries()]
    assert {*REGISTERED, *FORMATS} < set(names) and "reasoning_gym.NAME" in names
    assert all(one.sentence and one.options for one in entries())


@pytest.mark.parametrize("name", [*REGISTERED, "reasoning_gym.chain_sum"])
def test_a_listed_task_scores_right_and_wrong_answers(name: str) -> None:
    task = task_of(settings(f"env.name={name}"))
    record = task.record("test", 3)
    assert isinstance(task, HasTarget)
    target = task.target(record)
    assert target is not None
    assert score(task, record, target) == 1.0
    assert score(task, record, "<answer>-7</answer>") < 0.5


@pytest.mark.parametrize("name", RECORDS)
def test_a_listed_format_reads_a_file_and_scores_it(name: str, tmp_path: Path) -> None:
    record, right, wrong = RECORDS[name]
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(record))
    task = task_of(settings(f"env.name={name}", f"data.path={path}", "data.test_ratio=0"))
    found = task.record("train", 0)
    assert score(task, found, right) == 1.0 and score(task, found, wrong) == 0.0


def test_a_format_needs_a_file_and_gives_way_to_a_reward(tmp_path: Path) -> None:
    with pytest.raises(StreamrlError, match="env.name=gsm8k says how records of a file are scored: give data.path"):
        task_of(settings("env.name=gsm8k"))
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(RECORDS["gsm8k"][0]))
    task = task_of(settings("env.name=gsm8k", "reward.type=exact", f"data.path={path}", "data.test_ratio=0"))
    assert score(task, task.record("train", 0), "So it is 42") == 0.0


def test_words_choose_what_is_listed() -> None:
    assert lines(["calculator"])[0] == "tool.arithmetic" and "max_digits=2" in lines(["calculator"])[2]
    assert "max_terms=" in lines(["reasoning_gym.chain_sum"])[2]
    with pytest.raises(StreamrlError, match="no task contains countdwn. Did you mean countdown"):
        lines(["countdwn"])
