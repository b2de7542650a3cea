"""The tasks of the documentation and the README are loaded and played as a reader would."""

import re
from pathlib import Path

import pytest

from envs.check import check_task
from envs.registry import REGISTERED, load_task
from streamrl.config.load import load_config
from streamrl.environment import HasTarget

ROOT = Path(__file__).parents[3]


def file_of_the_page(name, tmp_path):
    block = re.search(rf"```python\n(# {name}\.py\n.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)
    path = tmp_path / f"{name}.py"
    path.write_text(block[1])
    task = load_task("", path=str(path))
    check_task(task)
    return task


@pytest.mark.parametrize("page", ["docs/environments.md", "README.md"])
def test_the_task_of_the_page_works_as_printed(page, tmp_path):
    block = re.search(r"```python\n(# my_task\.py\n.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert block, f"{page} shows no my_task.py"
    path = tmp_path / "my_task.py"
    path.write_text(block[1])

    task = load_task("", path=str(path))
    check_task(task)
    record = task.record("train", 0)

    assert isinstance(task, HasTarget)
    assert task.env().reset(record)[0].content == record["prompt"]
    right, wrong = task.reward(record, task.target(record)), task.reward(record, "no")
    assert getattr(right, "reward", right) > getattr(wrong, "reward", wrong)


def test_the_dataset_that_the_readme_names_works_with_the_experiment_that_it_names():
    words = re.search(r"`(experiment=\w+ env\.name=reasoning_gym\.\w+)`", (ROOT / "README.md").read_text())
    assert words
    env = load_config(words[1].split()).env

    check_task(load_task(env.name, options=env.options))


def test_the_page_names_every_registered_task_and_every_option():
    page = (ROOT / "docs/environments.md").read_text()

    for name in REGISTERED:
        assert f"`{name}`" in page or f"`.{name.removeprefix('string.')}`" in page
    for option in ("min_length", "alphabet", "answer_format", "instruction", "format_reward", "num_train", "seed"):
        assert f"`{option}`" in page


def test_the_environment_of_several_turns_plays_as_printed(tmp_path):
    task = file_of_the_page("guess", tmp_path)
    env = task.env()

    assert env.reset({"number": 4})[0].role == "user"
    assert not env.step("5").done
    assert env.step(" 4 ").reward == 1.0


def test_the_tool_of_the_page_answers_and_the_answer_is_scored(tmp_path):
    task = file_of_the_page("tool", tmp_path)
    env, record = task.env(), task.record("train", 0)
    env.reset(record)

    step = env.step(task.target(record))
    assert not step.done and step.messages[0].role == "tool" and step.messages[0].content == record["answer"]
    assert env.step(record["answer"]).reward == 1.0 and env.step("0").reward == 0.0
