"""The tasks of the documentation and the README are loaded and played as a reader would."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from envs.check import check_task
from envs.data.shapes import ANSWER_KEYS, PROMPT_KEYS
from envs.registry import REGISTERED, load_task, task_of
from envs.reward_file import GIVEN
from envs.rewards.registry import REWARDS
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


@pytest.mark.parametrize("page", ["docs/environments.md", "docs/first_hour.md"])
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


@pytest.mark.parametrize(("page", "sizes"), [("README.md", (1800, 200)), ("docs/data.md", (5, 1))])
def test_the_data_and_the_reward_of_the_page_work_as_printed(page, sizes, tmp_path, monkeypatch):
    text = (ROOT / page).read_text()
    monkeypatch.chdir(tmp_path)
    if made := re.search(r"^python (-c .*)$", text, re.MULTILINE):
        subprocess.run(f"{shlex.quote(sys.executable)} {made[1]}", shell=True, check=True, timeout=60)
    else:
        (tmp_path / "train.jsonl").write_text(re.search(r'```jsonl title="train.jsonl"\n(.*?)```', text, re.DOTALL)[1])
    (tmp_path / "reward.py").write_text(re.search(r"(def reward_fn\(messages, answer\):\n.*?)```", text, re.DOTALL)[1])
    command = re.search(r"streamrl launch (experiment=quickstart env.path=reward.py data.path=train.jsonl.*)\n", text)

    task = task_of(load_config(command[1].split()))
    check_task(task)

    assert (task.num_records("train"), task.num_records("test")) == sizes


def test_the_page_names_every_reward_and_every_field_that_is_looked_for():
    page, data = (ROOT / "docs/rewards.md").read_text(), (ROOT / "docs/data.md").read_text()

    assert not [name for name in REWARDS if f"| `{name}` |" not in page]
    assert not [name for name in GIVEN if f"| `{name}` |" not in page]
    assert not [key for key in (*PROMPT_KEYS, *ANSWER_KEYS) if f"`{key}`" not in data]


def test_the_dataset_that_the_page_names_works_with_the_experiment_that_it_names():
    page = (ROOT / "docs" / "tasks.md").read_text()
    words = re.search(r"(experiment=\w+ env\.name=reasoning_gym\.\w+)", page)
    assert words
    env = load_config(words[1].split()).env

    check_task(load_task(env.name, options=env.options))


def test_the_page_names_every_registered_task_and_every_option():
    page = (ROOT / "docs/tasks.md").read_text()

    for name in REGISTERED:
        assert f"`{name}`" in page or f"`.{name.removeprefix('string.')}`" in page
    for option in ("min_length", "alphabet", "answer_format", "instruction", "format_reward", "num_train", "seed"):
        assert f"`{option}`" in page


def test_the_environment_of_several_turns_plays_as_printed(tmp_path):
    task = file_of_the_page("guess", tmp_path)
    env = task.env()

    assert env.reset({"number": 2})[0].role == "user"
    assert not env.step("3").done and not env.step("I cannot.").done
    assert env.step(" Is it 2?").reward == 1.0
