"""reasoning_gym datasets as tasks: pure records, disjoint splits, the dataset's own scorer."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

from envs.check import check_task
from envs.registry import load_task
from envs.rewards.extract import last_answer_tag
from envs.rewards.workers import WorkerPool
from envs.tasks.reasoning import ReasoningTask, first_line, last_number, whole_text
from streamrl.errors import TaskError

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning_gym")

SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chain_sum", SMALL_SUMS),
        ("letter_counting", {"max_words": 5}),
        ("spell_backward", {"answer_format": "line"}),
        ("gcd", {}),
        ("knights_knaves", {"answer_format": "text"}),
    ],
)
def test_datasets_pass_the_start_up_check_and_reward_their_own_answers_in_full(name, options):
    task = load_task(f"reasoning_gym.{name}", options=options)
    check_task(task)

    for index in range(5):
        record = task.record("train", index)
        assert task.reward(record, task.target(record)).score == pytest.approx(1.0)


def test_an_actor_starts_and_ends_the_process_that_scores(monkeypatch):
    monkeypatch.setattr("envs.tasks.reasoning.WorkerPool", WorkerPool)  # not the one that these tests share
    task = load_task("reasoning_gym.chain_sum", options=SMALL_SUMS)
    before = set(psutil.Process().children(recursive=True))
    task.set_up()
    started = set(psutil.Process().children(recursive=True)) - before
    record = task.record("train", 0)
    assert len(started) == 1 and task.reward(record, record["answer"]).score == 1.0
    assert not hasattr(load_task("countdown"), "set_up")

    task.tear_down()
    assert psutil.wait_procs(started, timeout=20)[1] == []


def test_another_process_draws_the_same_records():
    task = ReasoningTask("chain_sum", **SMALL_SUMS, seed=3)
    program = (
        "import json; from envs.tasks.reasoning import ReasoningTask\n"
        "task = ReasoningTask('chain_sum', min_terms=2, max_terms=2, max_digits=2, seed=3)\n"
        "print(json.dumps([task.record('test', i) for i in range(5)]))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert json.loads(other.stdout) == [task.record("test", i) for i in range(5)]
    assert task.record("test", 0) != ReasoningTask("chain_sum", **SMALL_SUMS, seed=4).record("test", 0)


def test_no_question_is_in_both_splits():
    task = ReasoningTask("chain_sum", **SMALL_SUMS)
    train = {task.record("train", i)["question"] for i in range(2000)}
    test = {task.record("test", i)["question"] for i in range(200)}

    assert len(test) > 80
    assert not train & test


def test_reward_is_score_plus_a_named_format_part():
    task = ReasoningTask("chain_sum", **SMALL_SUMS, answer_format="tag", format_reward=0.1)
    record = {**task.record("train", 0)}

    right = task.reward(record, f"I think <answer> {record['answer']} </answer>")
    wrong = task.reward(record, "<answer>no</answer>")
    untagged = task.reward(record, str(record["answer"]))

    assert (right.reward, right.score) == (pytest.approx(1.1), 1.0)
    assert (wrong.reward, wrong.score) == (0.1, 0.0)
    assert wrong.parts == {"correct": 0.0, "format": 0.1, "unscored": 0.0}
    assert (untagged.reward, untagged.parts["format"]) == (0.0, 0.0)


def test_a_format_part_that_earns_nothing_is_no_part():
    task = ReasoningTask("chain_sum", **SMALL_SUMS)

    assert "format" not in task.reward(task.record("train", 0), "no number").parts


def test_the_instruction_follows_the_question_and_can_be_left_out():
    standard = ReasoningTask("gcd").record("train", 0)
    bare = ReasoningTask("gcd", instruction="").record("train", 0)

    assert standard["prompt"] == f"{bare['prompt']}\nReply with the number only."
    assert bare["prompt"] == bare["question"]


def test_a_dataset_that_is_not_a_function_of_its_seed_is_detected_when_scored():
    task = ReasoningTask("gcd")
    record = {**task.record("train", 0), "question": "another question"}

    with pytest.raises(TaskError, match="not a pure function"):
        task.reward(record, "1")


def test_a_dataset_with_a_single_question_has_no_second_split():
    task = ReasoningTask("chain_sum", min_terms=1, max_terms=1, max_digits=1)
    ten_questions = {task.record("train", i)["question"] for i in range(200)}
    only = task.record("train", 0)
    task._entry = lambda draw: {"question": only["question"], "answer": only["answer"]}

    assert len(ten_questions) < 10  # ten exist, and some belong to the test split
    assert task.record("train", 7)["question"] == only["question"]
    with pytest.raises(TaskError, match="too few different questions"):
        task.record("test", 0)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("chain_sums", {}, "Did you mean chain_sum"),
        ("chain_sum", {"max_term": 2}, "Did you mean max_terms"),
        ("chain_sum", {"size": 9}, "no option 'size'"),
        ("chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
        ("chain_sum", {"answer_format": "json"}, "choose one of number"),
        ("chain_sum", {"num_test": 0}, "num_train and num_test"),
    ],
)
def test_wrong_names_and_options_are_explained(name, options, said):
    with pytest.raises(TaskError, match=re.escape(said)):
        load_task(f"reasoning_gym.{name}", options=options)


@pytest.mark.parametrize(
    ("text", "number", "tag", "line", "whole"),
    [
        ("1 + 2 = 3", "3", None, "1 + 2 = 3", "1 + 2 = 3"),
        ("\n -1,234.5 \nso", "-1234.5", None, "-1,234.5", "-1,234.5 \nso"),
        ("<answer>a</answer> or <answer> 7\n</answer>", "7", "7", "<answer>a</answer> or <answer> 7", None),
        ("  \n", None, None, None, None),
        ("none.", None, None, "none.", "none."),
    ],
)
def test_answers_are_read_as_their_format_says(text, number, tag, line, whole):
    assert last_number(text) == number
    assert last_answer_tag(text) == tag
    assert first_line(text) == line
    assert whole_text(text) == (whole if whole is not None or not text.strip() else text.strip())


def test_the_package_is_imported_only_by_the_process_that_makes_such_a_task():
    program = (
        "import sys; from envs.registry import load_task; load_task('string.reverse');"
        "assert not {'reasoning_gym', 'torch', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
