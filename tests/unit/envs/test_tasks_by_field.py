"""Several tasks in one run: a field of the record says which plays and scores it."""

import json

import pytest

from actors.rollout import run_group
from envs.check import check_task
from envs.registry import task_of
from streamrl.config.load import load_config
from streamrl.environment import HasTarget
from streamrl.errors import TaskError
from tests.kit.loops import run
from tests.unit.actors.fakes import installed_engine, lease, make_runner, says

ROWS = [
    {"kind": "sums", "question": "3 + 4", "answer": "7"}, {"kind": "letters", "question": "say ab", "answer": "ab"},
    {"kind": "own", "question": "say k", "answer": "k"},
]
OWN = "async def reward_fn(messages, answer):\n    return {'reward': 0.25, 'own': 1.0}\n"


@pytest.fixture
def words(tmp_path):
    data, own = tmp_path / "mixed.jsonl", tmp_path / "own.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 10))
    own.write_text(OWN)
    tasks = f"{{sums: {{reward: {{type: math}}}}, letters: {{reward: {{type: exact}}}}, own: {{env: {{path: {own}}}}}}}"
    return [f"data.path={data}", "env.task_field=kind", f"env.tasks={tasks}"]


def scores(words, row, said, *more):
    """The scores of a trajectory with this answer, by name."""
    task, found = task_of(load_config(["experiment=quickstart", *words, *more])), []

    async def work():
        runner = make_runner(task, await installed_engine(says(said)), max_prompt_tokens=40)
        found.append(await run_group(lease(members=2, prompt=json.dumps(row).encode()), runner))
        await runner.close()

    run(work)
    assert len({json.dumps(member.scores) for member in found[0].members}) == 1
    return found[0].members[0].scores


@pytest.mark.shows("env.tasks", "env.task_field")
def test_each_record_is_scored_by_its_own_task_and_counted_by_its_name(words):
    sums, letters, own = ROWS
    assert scores(words, sums, "7").items() >= {"score": 1.0, "task_sums": 1.0}.items()
    assert scores(words, letters, "7").items() >= {"score": 0.0, "task_letters": 0.0}.items()
    assert scores(words, letters, "ab").items() >= {"score": 1.0, "task_letters": 1.0}.items()
    assert scores(words, own, "k") == {"score": 0.25, "own": 1.0, "task_own": 0.25}


def test_the_task_passes_the_check_at_the_start_and_knows_its_targets(words):
    task = task_of(load_config(["experiment=quickstart", *words]))
    check_task(task)
    assert isinstance(task, HasTarget) and task.num_records("train") + task.num_records("test") == 30
    targets = {row["kind"]: task.target(row) for row in ROWS}
    assert targets["letters"] == "ab" and "7" in targets["sums"]


@pytest.mark.parametrize(("word", "says"), [
    ("env.tasks={a: 1}", "give settings of env and reward"),
    ("env.tasks={a: {data: {path: x}}}", "give settings of env and reward"),
    ("env.tasks={1st: {reward: {type: exact}}}", "begin with a letter"),
    ("env.tasks={a: {reward: {type: nothing}}}", "env.tasks.a: "),
    ("env.tasks={a: {reward: {tipe: exact}}}", "env.tasks.a: "),
])
def test_a_task_that_is_none_is_refused_by_name(words, word, says):
    with pytest.raises(TaskError, match=says):
        task_of(load_config(["experiment=quickstart", *words[:2], word]))


def test_records_of_other_tasks_and_tasks_without_records_are_refused_by_name(words):
    task = task_of(load_config(["experiment=quickstart", *words]))
    with pytest.raises(TaskError, match="kind='x', and env.tasks has sums, letters, own"):
        task.env().reset({"kind": "x", "question": "q"})
    with pytest.raises(TaskError, match="give data.path"):
        task_of(load_config(["experiment=quickstart", words[2]]))
