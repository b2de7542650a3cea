"""Search-R1-style questions: searches are answered inside the model's message, answers compared, files read."""

import json
import re
import subprocess
import sys

import httpx
import pytest

from actors.settings import episode_rules
from envs.check import check_task
from envs.registry import load_task, task_of
from envs.tasks.search_questions import answers_of, normalized
from examples.tasks.search_world import SearchQuestions, World
from streamrl.config.load import load_config
from streamrl.environment import Step
from streamrl.errors import StreamrlError, TaskError

WORLD = "examples/tasks/search_world.py"


def file_task(tmp_path, *words: str, **record: object):
    (tmp_path / "wiki.jsonl").write_text(
        '{"title": "Oslo", "contents": "Oslo is the capital of Norway."}\n{"contents": "Bergen has rain."}\n'
    )
    (tmp_path / "nq.jsonl").write_text(json.dumps({"question": "Capital of Norway?", "answer": "Oslo", **record}))
    paths = [f"data.path={tmp_path}/nq.jsonl", f"env.tool_use.documents={tmp_path}/wiki.jsonl"]
    common = ["experiment=quickstart", "env.name=search.questions", "data.test_ratio=0"]
    return task_of(load_config([*common, *paths, *words]))


def test_an_episode_searches_once_for_each_hop_and_answers() -> None:
    task = SearchQuestions(min_hops=3, max_hops=3, format_reward=0.2)
    check_task(task)
    record = task.record("test", 4)
    env = task.env()
    assert env.reset(record)[0].content.endswith(record["question"])  # type: ignore[index]

    *turns, answer = task.target_turns(record)
    for said, found in zip(turns[::2], turns[1::2], strict=True):
        step = env.step(f"<think>{record['answer']}?</think>{said}")
        assert step.text == found and not step.done and step.reward == 0.0  # type: ignore[union-attr]
    assert record["answer"] in turns[-1] and record["answer"] not in "".join(turns[:-1])
    step = env.step(answer)
    assert isinstance(step, Step) and step.done
    assert (step.reward, step.score, step.parts) == (1.2, 1.0, {"searches": 3.0, "format": 0.2})


def test_a_wrong_answer_earns_nothing_and_what_is_no_action_is_told() -> None:
    task = SearchQuestions()
    env = task.env()
    env.reset(task.record("train", 0))
    idle, none = env.step("hm"), env.step("<search>qqq zzz</search>")
    assert "neither a search nor an answer" in idle.text and "Nothing was found" in none.text  # type: ignore
    assert env.step("<answer>Paris</answer>").reward == 0.0  # type: ignore[union-attr]


def test_a_turn_ends_where_a_search_or_an_answer_does() -> None:
    config = load_config(["experiment=search_questions", f"env.path={WORLD}", "policy.model_path=somewhere"])
    assert episode_rules(config, config.rollout.train.sampling, task_of(config)).stop == ("</search>", "</answer>")


def test_splits_share_no_person_and_every_document_belongs_to_the_world() -> None:
    task = SearchQuestions(num_people=100, max_hops=3)
    people = [{task.record(split, i)["person"] for i in range(300)} for split in ("train", "test")]
    assert not people[0] & people[1] and {task.record("test", i)["hops"] for i in range(30)} == {1, 2, 3}
    documents = World(100, 0).documents()
    assert len(documents) == 100 + 20 + 10 == len(set(documents)) and documents == World(100, 0).documents()
    assert documents != World(100, 1).documents()


@pytest.mark.parametrize(
    ("given", "right", "same"),
    [("The Beatles!", "beatles", True), (" New  York ", "new york", True), ("York", "New York", False),
     ("", "A", False), ("the", "The The", False), ("the the!", "The The", True), ("", "?", False), ("a", "A", True)],
)
def test_answers_are_compared_apart_from_case_articles_and_punctuation(given: str, right: str, same: bool) -> None:
    assert (normalized(given) == normalized(right)) == same


def test_answers_of_a_file_may_be_one_or_several() -> None:
    assert answers_of("a") == ["a"] and answers_of(["a", 2]) == answers_of({"target": ["a", 2]}) == ["a", "2"]
    with pytest.raises(TaskError, match="the right answer is"):
        answers_of({"target": []})


def test_questions_of_a_file_are_answered_from_its_documents(tmp_path) -> None:
    task = file_task(tmp_path, "env.options.num_results=1", "data.answer_key=golden_answers",
                     golden_answers=["Oslo", "Christiania"])
    check_task(task)
    env = task.env()
    env.reset(task.record("train", 0))
    assert env.step("<search>capital norway</search>").text == (
        "\n<information>Doc 1: Oslo\nOslo is the capital of Norway.</information>\n"
    )
    assert env.step("<answer>christiania</answer>").reward == 1.0
    assert task.stop == ("</search>", "</answer>") and task.target(task.record("train", 0)) == "<answer>Oslo</answer>"


def test_bad_options_are_refused(tmp_path) -> None:
    for options in ({"num_people": 3}, {"max_hops": 4}, {"num_results": 0}):
        with pytest.raises(TaskError, match=next(iter(options))):
            load_task("", path=WORLD, options=options)
    with pytest.raises(StreamrlError, match="no option 'num_people'"):
        file_task(tmp_path, "env.options.num_people=30")
    with pytest.raises(StreamrlError, match="set env.tool_use.documents=FILE"):
        file_task(tmp_path, "env.tool_use.documents=null")


@pytest.fixture
def service(tmp_path):
    """The address of examples/search_service.py over two documents."""
    (tmp_path / "corpus.jsonl").write_text(
        '{"title": "Oslo", "contents": "Oslo is the capital of Norway."}\n{"contents": "Bergen has rain."}\n'
    )
    command = [sys.executable, "-m", "examples.search_service", str(tmp_path / "corpus.jsonl"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield re.search(r"http://\S+", process.stdout.readline())[0].removesuffix("/retrieve")  # type: ignore[index]
    process.kill()
    process.wait()
    process.stdout.close()


def test_questions_are_answered_by_a_search_service_in_both_forms(tmp_path, service: str) -> None:
    task = file_task(tmp_path, f"env.tool_use.documents={service}/retrieve")
    env = task.env()
    env.reset(task.record("train", 0))
    found = env.step("<search>capital norway rain</search>").text
    assert found.startswith("\n<information>Doc 1: Oslo\nOslo is the capital of Norway.\nDoc 2: Bergen has rain.")
    passage = httpx.post(f"{service}/search", json={"query": "capital"}, trust_env=False).json()["passage"]
    assert passage == "Doc 1: Oslo\nOslo is the capital of Norway."
    with pytest.raises(TaskError, match="nowhere gave no documents"):
        file_task(tmp_path, f"env.tool_use.documents={service}/nowhere").env().step("<search>capital</search>")
    assert httpx.get(f"{service}/health", trust_env=False).json() == {"documents": 2}
