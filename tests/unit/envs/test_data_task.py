"""Records from a file and a reward from a file are a task that plays like any other."""

from __future__ import annotations

import asyncio
import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.check import check_task
from envs.data import dataset
from envs.data.shapes import PROMPT_KEYS, RecordShape
from envs.registry import task_of
from learner.supervised.records import AnswerShape
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.schema import DataConfig
from streamrl.environment import Step
from streamrl.errors import TaskError

BASE = to_plain(load_config(["experiment=quickstart"]))
REWARD = "def reward_fn(messages, answer):\n    return float(messages[-1]['content'].strip() == answer)\n"


@pytest.fixture
def task(tmp_path, monkeypatch):
    """task(*words, reward=...) over 100 sums in train.jsonl, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    sums = [{"question": f"{a} + {a} = ?", "answer": str(2 * a), "source": "sums"} for a in range(100)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sums))

    def make(*words, reward=REWARD):
        (tmp_path / "reward.py").write_text(reward)
        scored = () if any(word.startswith("reward.type") for word in words) else ("env.path=reward.py",)
        return task_of(from_plain(BASE, ["data.path=train.jsonl", *scored, *words]))

    return make


def played(task, completion, record=None) -> Step:
    """The step of one episode."""
    env = task.env()
    env.reset(task.record("train", 0) if record is None else record)
    result = env.step(completion)
    return asyncio.run(result) if inspect.isawaitable(result) else result


@pytest.mark.shows("data.path", "reward.type")
@pytest.mark.parametrize("words", [(), ("reward.type=exact",)])
def test_a_file_and_a_reward_are_a_task(task, words):
    made = task(*words)
    check_task(made)
    record = made.record("train", 0)

    assert made.env().reset(record)[0].content == record["question"]
    assert made.target(record) == record["answer"]
    assert (played(made, record["answer"]).reward, played(made, "no").reward) == (1.0, 0.0)


@pytest.mark.shows("data.test_ratio")
@pytest.mark.parametrize(("words", "num"), [((), 20), (("data.test_ratio=0.3",), 30), (("data.test_ratio=0",), 100)])
def test_a_part_of_the_file_is_held_out(task, words, num):
    made = task(*words)
    prompts = {split: {made.record(split, i)["question"] for i in range(made.num_records(split))}
               for split in ("train", "test")}

    assert made.num_records("test") == num
    assert len(prompts["train"] | prompts["test"]) == 100
    assert len(prompts["train"] & prompts["test"]) == (100 if num == 100 else 0)


@pytest.mark.shows("data.test_path")
def test_held_out_records_may_come_from_a_file_of_their_own(task, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "9 + 0 = ?", "answer": "9"}\n')
    made = task("data.test_path=test.jsonl")

    assert (made.num_records("train"), made.num_records("test")) == (100, 1)
    assert made.record("test", 0)["question"] == "9 + 0 = ?"


@pytest.mark.shows("data.prompt_key", "data.answer_key")
def test_the_fields_of_prompt_and_answer_can_be_named(task):
    made = task("data.prompt_key=source", "data.answer_key=question", "data.test_ratio=0")
    record = made.record("train", 0)

    assert made.env().reset(record)[0].content == "sums"
    assert played(made, record["question"]).reward == 1.0


def test_an_actor_plays_records_without_the_file(task, tmp_path):
    record = task().record("train", 0)
    (tmp_path / "train.jsonl").unlink()

    assert played(task(), record["answer"], record).reward == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("env.path=null",), "nothing says how answers are scored: give env.path=reward.py"),
        (("reward.type=exact", "env.path=reward.py"), "both score answers: leave one of them out"),
        (("reward.type=exact", "data.path=null"), "give data.path=train.jsonl, too"),
        (("reward.type=exakt",), "Did you mean exact?"),
    ],
)
def test_parts_that_do_not_make_a_task_are_named(task, words, said):
    with pytest.raises(Exception, match=said):
        task(*words)


def test_a_file_with_records_of_its_own_is_not_mixed_with_a_data_file(task):
    with pytest.raises(TaskError, match="makes its own records"):
        task(reward=REWARD + "def record(split, index):\n    return {}\n")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_an_instruction_is_followed_by_its_input(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(dataset, "NUM_CHECKED", 2)  # the others are read by their fields alone
    rows = [{"instruction": "Add.", "input": f"{n} and 1" if n % 3 else "", "output": str(n + 1)} for n in range(9)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        path.write_text("instruction,input,output\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    else:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    found = dataset.open_dataset(DataConfig(path=str(path), test_ratio=0.3))
    records = [found.train[at] for at in range(len(found.train))]

    expected = {"Add."} | {f"Add.\n\n{n} and 1" for n in range(9) if n % 3}
    held_out = {RecordShape().messages(found.test[at])[0].content for at in range(len(found.test))}
    assert {RecordShape().messages(record)[0].content for record in records} | held_out == expected
    assert not held_out & {RecordShape().prompt(record) for record in records} and len(held_out) in (2, 3)
    for record in records:
        question, answer = AnswerShape().messages(record)
        assert (question.content, answer.content) == (RecordShape().prompt(record), record["output"])
        assert RecordShape(prompt_key="instruction").prompt(record) == "Add."
        assert RecordShape(prompt_key="input").prompt(record) == record["input"]


@given(
    names=st.lists(st.sampled_from(PROMPT_KEYS), min_size=2, max_size=2, unique=True),
    as_messages=st.booleans(), contained=st.booleans(),
)
def test_a_record_with_two_prompts_is_refused_unless_one_holds_the_other(names, as_messages, contained):
    first, second = sorted(names, key=PROMPT_KEYS.index)
    if (first, second) == ("instruction", "input"):
        return
    text = "Answer: what is 2 + 2?"
    record = {
        second: "what is 2 + 2?" if contained else "what is 3 + 3?",
        first: [{"role": "user", "content": text}] if as_messages else text,
    }
    if contained:
        assert RecordShape().messages(record)[0].content == text
        return
    with pytest.raises(TaskError, match=f"'{first}' and '{second}' may both .* data.prompt_key={first}"):
        RecordShape().check(record)
    assert RecordShape(prompt_key=second).messages(record)[0].content == "what is 3 + 3?"
