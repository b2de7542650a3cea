"""The record's own answer stands beside the model's in the samples of a run."""

import json

import pytest

from envs.registry import task_of
from learner.record.step_samples import MAX_CHARS, ExpectedAnswers
from streamrl.config.eval_sets import eval_sets
from streamrl.config.load import load_config
from streamrl.metrics.samples import Sample

EVAL = [{"question": f"{n} + 1 = ?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(9)]
LONG = {"question": "long?", "answer": "x" * 2 * MAX_CHARS}
BROKEN = "def reward_fn(completion):\n    return 1.0\n\ndef target(record):\n    return record['missing']\n"


def sample(kind: str, record: int, dataset: str = "") -> Sample:
    return Sample(
        kind=kind, step=1, version=0, lag=0, prompt="?", answer="!", reward=0.0, score=0.0, num_tokens=1, group=0,
        member=0, record=record, dataset=dataset,
    )


@pytest.fixture
def expected(tmp_path, monkeypatch):
    """expected(*settings): what is expected of samples."""
    monkeypatch.chdir(tmp_path)
    records = {
        "train": [{"question": f"{n} * 2 = ?", "answer": 2 * n} for n in range(4)], "test": EVAL,
        "none": [{"question": "what?"}] * 2, "long": [LONG, LONG],
    }
    for name, some in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
    (tmp_path / "broken.py").write_text(BROKEN)

    def made(*words: str) -> ExpectedAnswers:
        config = load_config(["experiment=quickstart", *words])
        return ExpectedAnswers(task_of(config), eval_sets(config))

    return made


def test_the_answer_of_a_records_split_and_set_is_found(expected):
    answers = expected("data.path=train.jsonl", "data.test_path=test.jsonl", "reward.type=math", "data.shuffle=false",
                       "eval.datasets.hard=test.jsonl", "eval.datasets.long=long.jsonl")

    assert [answers(sample("train", n)) for n in (0, 3, 5)] == ["0", "6", "2"]  # from the start again
    assert answers(sample("eval", 3)) == "4"  # without its derivation
    assert answers(sample("eval", 8, "hard")) == "9"
    assert answers(sample("eval", 0, "long")) == "x" * MAX_CHARS


def test_a_task_by_name_shows_its_target(expected):
    answers = expected("env.name=string.reverse")
    task = task_of(load_config(["experiment=quickstart", "env.name=string.reverse"]))

    assert answers(sample("train", 7)) == task.target(task.record("train", 7))
    with_tools = expected("env.name=string.reverse", "env.tools=[calculator]", "env.max_turns=3")
    assert with_tools(sample("train", 7)) == answers(sample("train", 7))


@pytest.mark.parametrize(
    "words",
    [["data.path=none.jsonl", "env.path=broken.py"], ["data.path=gone.jsonl", "reward.type=exact"]],
)
def test_a_record_without_an_answer_and_code_that_fails_give_none(expected, words):
    assert expected(*words)(sample("train", 0)) == ""
