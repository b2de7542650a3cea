"""`env.name=verifiers:ID`: our side, before a fake of the process that has the package; tests/flow has the package."""

import asyncio
import json
import sys

import pytest

from actors.rollout import run_group
from envs.agents.verifiers import _Processes
from envs.registry import task_of
from streamrl.config.load import to_plain
from streamrl.environment import AgentSession
from streamrl.errors import ConfigError, TaskError
from streamrl.messages import MemberStatus, Outcome
from streamrl.named_code import check_allowed
from tests.kit.loops import run, until
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.actors.test_agents import play, settings
from tests.unit.actors.test_rewritten_history import TOKENIZER, Renderer, replies, sequences
from tests.unit.envs.adapters.test_interaction_loops import START, member_of

FAKE_WORKER = r"""
import json, os, sys, urllib.request
given = json.loads(sys.argv[1])
assert given["taskset"]["id"] == "words"
if sys.argv[2] == "tasks":
    if given["taskset"].get("size") is None:
        sys.exit("no such taskset")
    for index in range(given["taskset"]["size"]):
        print(json.dumps({"prompt": "q", "task": {"idx": index, "does": given.get("does", "play")}}))
else:
    for line in sys.stdin:
        asked = json.loads(line)
        open(NOTES, "a").write(line)
        does = asked.get("task", {}).get("does")
        if does == "die":
            os._exit(3)
        if does == "close":
            os.close(1)
        if does == "leave":
            import subprocess
            subprocess.Popen(["sleep", "30"], start_new_session=True)
            os._exit(3)
        if does == "chatter":
            os.write(1, b'Loading...\n5\n[]\n{}\n{"id": "x", "reward": 1}\n{"id": 99, "reward": 1}\n\xff\n')
            os.write(1, b"[" * 100_000 + b"\n")
            does = "play"
        if does == "fail":
            print(json.dumps({"id": asked["id"], "error": "ValueError: of the taskset"}), flush=True)
        if does == "play":
            body = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode()
            url, key = asked["base_url"] + "/chat/completions", {"x-api-key": asked["api_key"]}
            request = urllib.request.Request(url, body, key)
            said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
            print(json.dumps({"id": asked["id"], "reward": {"reward": 0.5, "same": float(said == "x")}}), flush=True)
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Makes the task with these options; the requests of its process are in the file `notes`."""
    (tmp_path / "worker.py").write_text(FAKE_WORKER.replace("NOTES", repr(str(tmp_path / "notes"))))
    monkeypatch.setattr("envs.agents.verifiers.WORKER", str(tmp_path / "worker.py"))
    made = []

    def make(*options: str):
        made.append(task_of(settings("env.name=verifiers:words", "env.options.taskset.size=30", *options)))
        return made[-1]

    yield make
    for one in made:
        one.tear_down()


def test_the_last_tasks_are_held_out(words):
    assert [words().num_records(split) for split in ("train", "test")] == [27, 3]
    task = words("env.options.num_test=10")
    assert [task.num_records(split) for split in ("train", "test")] == [20, 10]
    assert (task.record("train", 19)["task"]["idx"], task.record("test", 0)["task"]["idx"]) == (19, 20)


def test_a_taskset_plays_an_episode_through_its_session(words):
    task = words()
    member = member_of(play(task, "x", record=task.record("train", 0))[0])
    assert sequences(member) == [f"{START}|x"]
    assert member.reward == 0.5 and member.scores == {"score": 0.5, "same": 1.0}


@pytest.mark.parametrize(("does", "says"), [
    ("fail", "ValueError: of the taskset"), ("die", "its process ended"), ("close", "its process ended"),
    ("leave", "its process ended"),
])
async def test_an_episode_that_fails_costs_its_own_trajectory_and_a_dead_process_has_a_successor(words, does, says):
    task = words(f"env.options.does={does}")
    record = task.record("train", 0)

    engine = await installed_engine(replies("x"))
    runner = make_runner(task, engine, renderer=Renderer(TOKENIZER), max_prompt_tokens=40)
    groups = []
    for one in (record, {**record, "task": {"does": "play"}}):
        groups.append(await run_group(lease(prompt=json.dumps(one).encode()), runner))
    await runner.close()
    assert groups[0].outcome == Outcome.RETURNED and says in groups[0].detail
    assert member_of(groups[1]).status == MemberStatus.FINISHED


def test_lines_that_are_no_answers_are_for_the_log(words, capfd):
    task = words("env.options.does=chatter")
    assert member_of(play(task, "x", record=task.record("train", 0))[0]).reward == 0.5
    assert "Loading..." in capfd.readouterr().err


async def test_a_process_that_reads_nothing_is_ended_and_does_not_stop_the_loop(monkeypatch):
    monkeypatch.setattr("envs.agents.verifiers.MAX_UNREAD", 4)
    processes = _Processes([sys.executable, "-c", "import time; time.sleep(1000)"])
    session = AgentSession("http://127.0.0.1:9/v1", "key")

    large = {"task": "x" * (1 << 18)}
    played = [asyncio.ensure_future(processes.play(large, session)) for _ in range(8)]
    # Four lines wait and perhaps one is being written: the first five are surely the process's that is ended.
    errors = await asyncio.gather(*played[:5], return_exceptions=True)
    processes.close()  # a successor that the others may have met
    errors += await asyncio.gather(*played[5:], return_exceptions=True)
    assert all("its process ended" in str(error) for error in errors)


def test_an_episode_over_its_time_is_cancelled_in_the_process(words, tmp_path):
    task = words("env.options.does=wait")
    group, _ = play(task, record=task.record("train", 0), step_timeout_s=0.5)
    assert "ran for more than env.step_timeout_s" in group.detail
    run(lambda: until(lambda: '{"cancel": 0}' in (tmp_path / "notes").read_text()))


@pytest.mark.parametrize(("options", "says"), [
    (["env.options.taskset.size=null"], "python, which is not set .*0.4 and the taskset .*: no such taskset$"),
    (["env.options.taskset.size=null", f"env.options.python={sys.executable}"], "python is that of an environment"),
    (["env.options.num_test=30"], "has 30 tasks: env.options.num_test must leave some"),
    (["env.options.python=/no/such/python"], "env.options.python cannot be started"),
])
def test_a_taskset_that_cannot_be_had_is_refused_by_name(words, options, says):
    with pytest.raises(TaskError, match=f"(?s){says}"):
        words(*options).num_records("train")


def test_a_hub_may_not_name_an_interpreter_that_the_actor_does_not_allow():
    given = to_plain(settings("env.name=verifiers:words", f"env.options.python={sys.executable}"))
    own = to_plain(settings("env.name=verifiers:words"))
    with pytest.raises(ConfigError, match="env.options="):
        check_allowed(given, own)
    check_allowed(given, given)
    inherited = {"env": {**own["env"], "tasks": {"one": {"env": {"options": {"python": sys.executable}}}}}}
    with pytest.raises(ConfigError, match="env.tasks.one.env.options="):
        check_allowed(inherited, own)

