"""`env.agent_command`: the program of an episode, what it is told, what it leaves, and what ends with it."""

import json
import sys

import pytest

from envs.agents.task import TAIL_BYTES, _clients
from envs.registry import task_of
from envs.tools.task import WrappedTask
from streamrl.messages import Outcome
from streamrl.processes import process_state
from tests.unit.actors.test_agents import play, settings
from tests.unit.actors.test_rewritten_history import TOKENIZER
from tests.unit.envs.adapters.test_interaction_loops import RECORD, member_of

ASKS = """
import json, os, sys, urllib.request
record = json.load(open(os.environ["STREAMRL_RECORD"]))
body = json.dumps({"messages": [{"role": "user", "content": record.get("prompt", "q")}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("the model said", said)
"""


@pytest.mark.shows("env.agent_command")
@pytest.mark.parametrize(("end", "reward"), [
    ("print(0.25)", 0.25), ('print(json.dumps({"reward": 0.5, "turns": 1}))', 0.5), ("", 1.0), ("print()", 1.0),
])
def test_a_program_plays_and_its_last_line_is_the_reward(tmp_path, end, reward):
    task = command(tmp_path, ASKS + end, "env.name=string.reverse")
    group, _ = play(task, "7", record=task.base.record("train", 0) | {"prompt": "q"}, reply=reversing(task))
    assert member_of(group).reward == reward


def command(tmp_path, program: str, *words: str) -> WrappedTask:
    (tmp_path / "agent.py").write_text(program)
    return task_of(settings(f"env.agent_command='{sys.executable} {tmp_path}/agent.py'", *words))


def reversing(task: WrappedTask):
    """The right answer to the task's first record, whatever is asked."""
    said = TOKENIZER.encode(task.target(task.base.record("train", 0)), add_special_tokens=False)
    return lambda *_: said


def test_a_program_that_fails_loses_its_trajectory_with_its_last_words(tmp_path):
    group, _ = play(command(tmp_path, "import sys\nsys.exit('no such tool')"))
    assert group.outcome == Outcome.RETURNED and "status 1, see its last line: no such tool" in group.detail
    group, _ = play(task_of(settings("env.agent_command=/no/such/program")))
    assert "env.agent_command cannot be started" in group.detail


@pytest.mark.parametrize("end", ["print(0.5)", "time.sleep(1000)", "os.abort()", "os.killpg(0, 9)"])
def test_however_a_program_ends_all_that_it_started_ends_with_it(tmp_path, end):
    pids = tmp_path / "pids"
    program = ASKS + f"""
import subprocess, time
child = subprocess.Popen(["sleep", "1000"])
away = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={{}}, stdout=subprocess.DEVNULL)
shell = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, text=True)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}} {{away.pid}} {{shell.stdout}}")
{end}
"""
    group, _ = play(command(tmp_path, program), "7", step_timeout_s=8.0 if "sleep" in end else 20.0)
    if end == "print(0.5)":
        assert member_of(group).reward == 0.5
    else:
        assert ("ran for more than env.step_timeout_s=8" in group.detail) == ("sleep" in end)
        assert ("ended with status -" in group.detail) == ("sleep" not in end)
    for pid in map(int, pids.read_text().split()):
        assert process_state(pid) in ("", "Z")


def test_of_a_flood_of_output_the_end_is_kept_and_nothing_else(tmp_path):
    program = ASKS + """
for _ in range(300):
    sys.stdout.write("x" * (1 << 16))
    sys.stderr.write("y\\n" * (1 << 15))
folder = os.path.dirname(os.environ["STREAMRL_RECORD"])
kept = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
print()
print('{"reward": 1.0, "kept": %d}' % kept)
"""
    member = member_of(play(command(tmp_path, program), "7")[0])
    assert member.reward == 1.0 and member.scores["kept"] < TAIL_BYTES


def test_a_program_does_not_see_the_keys_of_the_run(tmp_path, monkeypatch):
    names = ("JUDGE_KEY", "ADMIN_KEY_OF_MINE", "STREAMRL_API_KEY", "STREAMRL_RANK_KEYS", "SEARCH_API_KEY")
    for name in names:
        monkeypatch.setenv(name, "secret")
    data = tmp_path / "q.jsonl"
    data.write_text(json.dumps(RECORD) + "\n")
    program = ASKS + f"\nprint(json.dumps({{one: 1.0 for one in {names} if one in os.environ}} | {{'reward': 1}}))"
    words = [f"data.path={data}", "reward.type=judge", "reward.judge.url=http://127.0.0.1:9",
             "reward.judge.api_key_env=JUDGE_KEY", "actors.endpoint.admin_key_env=ADMIN_KEY_OF_MINE"]
    member = member_of(play(command(tmp_path, program, *words), "7")[0])
    assert {name for name in member.scores if name in names} == {"SEARCH_API_KEY"}


@pytest.mark.parametrize("agent", ["sdk_once", "anthropic", "own_client", "a program"])
def test_a_proxy_of_http_does_not_stand_between_an_agent_and_its_actor(tmp_path, monkeypatch, agent):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, ".example.org")
    _clients.cache_clear()
    if agent == "a program":
        task = command(tmp_path, ASKS + "print(1.0)")
    else:
        task = task_of(settings(f"env.agent=tests.unit.actors.test_agents:{agent}"))
    assert member_of(play(task, "7<end>")[0]).reward == 1.0
    _clients.cache_clear()
