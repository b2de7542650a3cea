"""From a name, a module path or a file to a task; every failure says what was found and what to do."""

import asyncio
import importlib.util
import inspect
import json
import py_compile
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from envs.catalog import entries, lines
from envs.check import check_task
from envs.registry import REGISTERED, load_task, task_of
from envs.tasks.named import FORMATS
from envs.tasks.strings import StringTask
from streamrl.config.load import from_plain
from streamrl.environment import ChatMessage, HasTarget, SingleTurnTask, Step, Task
from streamrl.errors import StreamrlError, TaskError

PAIR = """
    def record(split, index):
        return {"prompt": f"{split} {index}"}

    def reward(record, completion):
        return float(completion == record["prompt"])
"""
ONE_CLASS = """
    from streamrl import SingleTurnTask

    class Shout(SingleTurnTask):
        name = "shout"

        def __init__(self, loudness=1):
            self.loudness = loudness

        def record(self, split, index):
            return {"prompt": "ab" * self.loudness}

        def reward(self, record, completion):
            return float(completion == record["prompt"].upper())
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="my_task.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write_file


def test_a_registered_name_takes_its_options():
    task = load_task("string.sort", options={"max_length": 4})

    assert isinstance(task, StringTask)
    assert (task.operation, task.max_length) == ("sort", 4)


@pytest.mark.parametrize(("name", "words"), [
    ("game.guess_number", "games.py"), ("game.maze", "games.py env.options.game=maze"),
    ("search.questions", "search_world.py"),
])
def test_a_task_that_is_an_example_says_how_it_is_given(name, words):
    with pytest.raises(TaskError, match=f"env.name={name} is an example: give env.path=examples/tasks/{words} in the"):
        load_task(name)
    assert load_task("", path=f"examples/tasks/{words.partition(' ')[0]}").num_records("test") > 0


def test_a_class_is_found_by_its_module_path():
    task = load_task("envs.tasks.strings:StringTask", options={"operation": "copy"})

    assert task.name == "string.copy"


OTHER_WAYS = " also gem, .*gsm8k.*openenv:.*verifiers:ID, reasoning_gym"
NO_TASK = "is a class without num_records and record and env, not a task"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("string.revers", r"Did you mean string\.reverse"),
        ("openenv", f"Did you mean openenv:http://HOST:PORT.*{OTHER_WAYS}"),
        ("verifier", f"Did you mean verifiers:ID.*{OTHER_WAYS}"),
        ("gsm8", f"Did you mean gsm8k.*{OTHER_WAYS}"),
        ("gemm", f"Did you mean gem.*{OTHER_WAYS}"),
        ("no_such_package.tasks:Mine", "cannot import 'no_such_package'"),
        ("envs.tasks.strings:StringTusk", "has no 'StringTusk'. Did you mean StringTask"),
        ("envs.tasks.strings:ALPHABET", "is a str: name a class or a function"),
        ("envs.tasks.strings:partial_credit", "missing option answer, completion"),
        ("types:SimpleNamespace", NO_TASK), ("envs.check:Step", NO_TASK), ("fractions:Fraction", NO_TASK),
    ],
)
def test_a_name_without_a_task_says_what_is_wrong(name, said):
    with pytest.raises(TaskError, match=said):
        load_task(name)


def test_an_unknown_option_is_refused_with_the_nearest_and_all_valid_ones():
    with pytest.raises(TaskError, match=r"no option 'max_len'\. Did you mean max_length.*\? Valid options: alphabet, "):
        load_task("string.reverse", options={"max_len": 5})


def test_two_functions_in_a_file_are_a_task(write):
    task = load_task("", path=write(PAIR + "\n    num_train = 7\n"))
    check_task(task)
    env = task.env()
    messages = env.reset(task.record("train", 3))

    assert (task.name, task.num_records("train"), task.num_records("test")) == ("my_task", 7, 200)
    assert messages[0].content == "train 3"
    assert env.step("train 3") == Step(reward=1.0)


def test_a_file_is_run_by_its_text_and_not_by_bytecode_beside_it(write, tmp_path):
    path = write(PAIR + "\n    num_train = 7\n")
    other = tmp_path / "other.py"
    other.write_text(textwrap.dedent(PAIR) + "\nnum_train = 9\n")
    never_compared = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), importlib.util.cache_from_source(path), invalidation_mode=never_compared)
    assert load_task("", path=path).num_records("train") == 7


def test_the_functions_target_and_messages_are_taken_up(write):
    more = """
    from streamrl import ChatMessage

    def target(record):
        return record["prompt"]

    def messages(record):
        return [ChatMessage("system", "Repeat."), ChatMessage("user", record["prompt"])]
"""
    task = load_task("", path=write(PAIR + more))
    check_task(task)

    assert isinstance(task, HasTarget) and task.target({"prompt": "x"}) == "x"
    assert [message.role for message in task.env().reset({"prompt": "x"})] == ["system", "user"]
    assert not isinstance(load_task("", path=write(PAIR)), HasTarget)


CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]


@pytest.mark.parametrize("record", [{"prompt": CHAT}, {"messages": CHAT}, {"prompt": CHAT, "messages": []}])
def test_a_prompt_may_be_a_list_of_messages(record):
    assert SingleTurnTask().messages(record) == [ChatMessage("system", "Add."), ChatMessage("user", "1 + 1")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": 7}, "record['prompt'] is 7 (int): give a string, or a list of"),
        ({"prompt": None}, "record['prompt'] is None (NoneType)"),
        ({"prompt": []}, "record['prompt'] is [] (list)"),
        ({"prompt": {"role": "user", "content": "x"}}, "(dict)"),
        ({"prompt": ["x"]}, "record['prompt'], message 1 is 'x' (str)"),
        ({"messages": [{"role": "user"}]}, "record['messages'], message 1 is {'role': 'user'} (dict)"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]},
         "message 1 has {'type': 'text'} (dict) in its content: text only"),
    ],
)
def test_a_prompt_of_another_type_is_refused_by_name(record, said):
    with pytest.raises(TaskError, match=re.escape(said)):
        SingleTurnTask().messages(record)


def test_the_path_wins_over_the_name_and_one_class_takes_the_options(write):
    task = load_task("string.reverse", path=write(ONE_CLASS), options={"loudness": 2})
    check_task(task)

    assert task.record("train", 0)["prompt"] == "abab"


def test_the_function_task_decides_among_several_classes(write):
    two = ONE_CLASS + "\n    class Whisper(Shout):\n        name = 'whisper'\n"
    with pytest.raises(TaskError, match="more than one task: class Shout, class Whisper. Add a function task"):
        load_task("", path=write(two))

    task = load_task("", path=write(two + "\n    def task():\n        return Whisper()\n"))

    assert task.name == "whisper"


@pytest.mark.parametrize("name", ["wave.py", "my_task.py"])
def test_neither_a_file_nor_one_next_to_it_stands_in_front_of_a_package(write, monkeypatch, name):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    write("raise RuntimeError('not the package')", "wave.py")
    before = list(sys.path)
    task = load_task("", path=write("import wave\nassert wave.Wave_read\n" + textwrap.dedent(PAIR), name))
    assert task.num_records("train") and sys.path == before


def test_the_folder_of_a_file_keeps_its_place_on_the_path(write, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.path)
    load_task("", path=write(PAIR))
    assert sys.path == before


def test_an_imported_class_is_not_taken_for_the_files_own(write):
    task = load_task("", path=write("from envs.tasks.strings import StringTask\n" + textwrap.dedent(PAIR)))

    assert task.name == "my_task"


def test_a_file_may_import_the_file_next_to_it_and_hold_dataclasses(write):
    write("ANSWER = 42\n", "neighbor_of_my_task.py")
    task = load_task(
        "",
        path=write(
            """
            from __future__ import annotations
            from dataclasses import dataclass
            import neighbor_of_my_task

            @dataclass
            class Question:
                answer: int

            def record(split, index):
                return {"prompt": "?", "answer": Question(neighbor_of_my_task.ANSWER).answer}

            def reward(record, completion):
                return float(completion == str(record["answer"]))
            """
        ),
    )

    assert task.record("test", 0)["answer"] == 42


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero (my_task.py, line 2: y = 1 / 0)"),
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_module_here\n", "ModuleNotFoundError"),
        (
            "def reward(record, completion):\n    return 0.0\n",
            "scores answers but holds no prompts: give it records with data.path=train.jsonl",
        ),
        ("", "Found: nothing"),
        (
            "class Calc:\n    name = 'calc'\n    def record(self, split, index): ...\n    def env(self): ...\n"
            "class CalcEnv:\n    def reset(self, record): ...\n",
            "Found: Calc, CalcEnv. Calc lacks num_records. Define one class",
        ),
        (
            "class Calc:\n    def num_records(self, split): ...\n    def record(self, split, index): ...\n"
            "    def env(self): ...\n",
            "task my_task.py is a Calc, not a task: it must have name, num_records, record and env (derive it from "
            "streamrl.SingleTurnTask). It lacks name.",
        ),
        ("def task():\n    return 3\n", "is a int, not a task"),
        ("def task():\n    raise KeyError('deep')\n", "KeyError: 'deep' (my_task.py, line 2: raise KeyError('deep'))"),
        ("def task(size):\n    return size\n", "missing option size: set env.options.size"),
    ],
)
def test_a_broken_file_is_explained_by_its_own_line(write, text, said):
    with pytest.raises(TaskError, match=re.escape(said)):
        load_task("", path=write(text))


def test_a_missing_file_and_a_file_that_is_not_python_are_named(write):
    with pytest.raises(TaskError, match="no such file"):
        load_task("", path="nowhere/my_task.py")
    with pytest.raises(TaskError, match="must end in .py"):
        load_task("", path=write("hello", "notes.txt"))


# --- Every task that `streamrl tasks` lists loads a record and tells right from wrong answers --

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
