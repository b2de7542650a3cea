"""The start-up check says so if a record's own answer earns nothing, in whatever form the reward looks for it."""

from __future__ import annotations

import json

import pytest

from envs.check import check_task
from envs.registry import task_of
from streamrl.config.load import load_config

STRIP = 'def reward_fn(messages, answer):\n    return float(messages[-1]["content"].strip() == {})\n'
CONTAINED = "def reward_fn(completion, answer):\n    return float({} in completion)\n"
RAISES_LATER = (
    "def reward_fn(completion, answer):\n    if 'boxed' in completion:\n        raise ValueError(completion)\n"
    "    return float(completion == answer)\n"
)
TURNS = (
    "from streamrl import ChatMessage, Step\n\nclass Env:\n    def reset(self, record):\n"
    "        return [ChatMessage('user', record['question'])]\n\n    def step(self, action):\n"
    "        return Step(0.0, done=False, messages=[ChatMessage('user', 'more')])\n"
)
ALL = " (nor do 15 more of 16 records looked at)"
NUMBER = f"the right answer of the first record (1, a number) earns nothing: compare texts, or use str(answer){ALL}"
TEXT = f"the right answer of the first record ('1', a text) earns nothing: look at how the reward compares it{ALL}"


def told(tmp_path, monkeypatch, answer: object, *words: str, reward: str | None = None, late: object = None):
    """The lines of the check for 40 records with this answer, or for 20 of it and 20 with `late`."""
    monkeypatch.chdir(tmp_path)
    answers = [answer] * 20 + [answer if late is None else late] * 20
    records = [{"question": f"{n} + 1 - {n} = ?", "answer": one} for n, one in enumerate(answers)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if reward is not None:
        (tmp_path / "reward.py").write_text(reward)
        words = (*words, "env.path=reward.py")
    lines: list[str] = []
    task = task_of(load_config(["experiment=quickstart", "data.path=train.jsonl", *words]))
    check_task(task, notify=lines.append)
    return lines


@pytest.mark.parametrize(
    ("answer", "reward", "lines"),
    [
        (1, STRIP.format("answer"), [NUMBER]),
        (1, STRIP.format("str(answer)"), []),
        ("1", STRIP.format("answer"), []),
        ("1", STRIP.format("answer + ' '"), [TEXT]),
        (1, STRIP.format("answer") + "\n\ndef target(record):\n    return str(record['answer'])\n", [NUMBER]),
        (1, STRIP.format("answer").replace(" == answer)", " == answer) - 1.0"), [NUMBER]),  # -1 for a wrong one
        ("1", CONTAINED.format(r"'\\boxed{' + answer + '}'"), []),
        ("1", CONTAINED.format("'<answer> ' + answer"), []),
        ("1", CONTAINED.format("'FINAL ' + answer"), [TEXT]),
        ("1", "def reward_fn(completion):\n    return -float(len(completion))\n", []),
        ("1", RAISES_LATER, []),
        ("1", RAISES_LATER.replace("== answer", "== 3"), []),
        (None, "def reward_fn(completion):\n    return 0.0\n", []),
        ("1", TURNS, []),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_users_reward_is_asked_for_the_records_own_answer(tmp_path, monkeypatch, answer, reward, lines):
    words = ("env.max_turns=3",) if reward is TURNS else ()
    assert told(tmp_path, monkeypatch, answer, *words, reward=reward) == lines


@pytest.mark.parametrize("kind", ["exact", "math", "boxed", "think_answer_tags", "tags", "repetition", "length"])
@pytest.mark.parametrize("answer", [1, "1", r"\pi"])
def test_shipped_rewards_pay_the_records_own_answer_or_read_none(tmp_path, monkeypatch, kind, answer):
    assert told(tmp_path, monkeypatch, answer, f"reward.type={kind}") == []



def test_several_rewards_are_asked_together(tmp_path, monkeypatch):
    assert told(tmp_path, monkeypatch, 1, "reward.weights={exact: 1.0, repetition: 0.1}") == []
    assert told(tmp_path, monkeypatch, 1, "reward.weights={exact: 0.0, repetition: 0.1}") == []  # its score is 1


def test_records_after_the_first_are_looked_at(tmp_path, monkeypatch):
    (line,) = told(tmp_path, monkeypatch, "1", reward=STRIP.format("answer"), late=2)
    assert line.startswith("the right answer of record ") and "(2, a number) earns nothing: compare texts" in line
    assert "more of 16 records looked at)" in line


@pytest.mark.parametrize("kind", ["math", "boxed", "think_answer_tags"])
def test_a_whole_solution_without_a_box_is_no_answer(tmp_path, monkeypatch, kind):
    solution = "We add the numbers one by one and look at what is left of them.\n\n" * 5
    (line,) = told(tmp_path, monkeypatch, "1", f"reward.type={kind}", late=solution)
    assert f"{len(solution)} characters) is no answer but a whole text: end it with \\boxed" in line
    for ending in (r"So it is $\boxed5$.", r"So it is \boxed{5}.", "#### 5"):
        assert told(tmp_path, monkeypatch, "1", f"reward.type={kind}", late=solution + ending) == []
    assert told(tmp_path, monkeypatch, "1", "reward.type=exact", late=solution) == []
