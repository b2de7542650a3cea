"""A reward in TRL's batched form is called once for the members of a group; what a failure in it costs."""

import json

import pytest

from actors.rollout import run_group
from envs.registry import task_of
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.environment import ChatMessage, Step
from streamrl.messages import Group, MemberStatus, Outcome, ReturnReason
from tests.kit.loops import run
from tests.unit.actors.fakes import installed_engine, lease, make_runner, says

BASE = to_plain(load_config(["experiment=quickstart"]))
RECORD = {"question": "1 + 1 = ?", "answer": "2", "level": 3}
FINISHED, ABORTED = MemberStatus.FINISHED, MemberStatus.ABORTED


def played(tmp_path, reward: str, *, num_members: int = 4, step_timeout_s: float = 5.0) -> Group:
    """Member 0 says `a`, member 1 says `b`, ..."""
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD))
    (tmp_path / "reward.py").write_text(reward)
    words = [f"env.path={tmp_path}/reward.py", f"data.path={tmp_path}/train.jsonl", "data.test_ratio=0"]
    return group_of(task_of(from_plain(BASE, words)), num_members, step_timeout_s)


def group_of(task, num_members: int, step_timeout_s: float = 5.0) -> Group:
    groups = []

    async def work():
        engine = await installed_engine(lambda prompt, seed, version: says("abcdefgh"[seed])(prompt, seed, version))
        runner = make_runner(task, engine, step_timeout_s=step_timeout_s)
        seeds = tuple(range(num_members))
        granted = lease(members=num_members, seeds=seeds, prompt=json.dumps(RECORD).encode())
        groups.append(await run_group(granted, runner))

    run(work)
    return groups[0]


def rewards(group: Group) -> list[float]:
    return [member.reward for member in group.members]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_one_call_scores_the_whole_group(tmp_path, prefix):
    group = played(tmp_path, (
        f"calls = []\n{prefix}def reward(prompts, completions, answer, level, **kwargs):\n"
        "    calls.append(len(completions))\n"
        "    assert prompts == ['1 + 1 = ?'] * 4 and answer == ['2'] * 4 and level == [3] * 4\n"
        "    return [len(calls) + sorted(completions).index(one) / 10 for one in completions]\n"
    ))
    assert group.outcome == Outcome.COMPLETE
    assert rewards(group) == [1.0, 1.1, 1.2, 1.3]


def test_a_bad_entry_costs_its_own_member(tmp_path):
    group = played(tmp_path, (
        "def reward(completions):\n"
        "    return [None if one == 'c' else {'reward': 1.0, 'p': 2.0} for one in completions]\n"
    ))
    assert [one.status for one in group.members] == [FINISHED, FINISHED, ABORTED, FINISHED]
    assert rewards(group) == [1.0, 1.0, 0.0, 1.0] and group.members[3].scores == {"score": 1.0, "p": 2.0}
    assert "returned None" in group.detail


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('gold')", "KeyError: 'gold'"),
        ("return [1.0] * 3", "for 4 completions it returned [1.0, 1.0, 1.0]"),
        ("import time; time.sleep(1)", "ran for more than env.step_timeout_s=0.2"),
    ],
)
def test_a_call_that_fails_costs_the_whole_group(tmp_path, body, said):
    group = played(tmp_path, f"def reward(completions):\n    {body}\n", step_timeout_s=0.2)
    assert (group.outcome, group.reason) == (Outcome.RETURNED, ReturnReason.ENV_ERROR) and said in group.detail


class Ranks:
    """A task whose second member fails before it has an answer; the others are scored by how many there are."""

    name = "ranks"
    made = 0

    def num_records(self, split):
        return 1

    def record(self, split, index):
        return RECORD

    def env(self):
        Ranks.made += 1
        return RankEnv(Ranks.made)


class RankEnv:
    def __init__(self, number):
        self.number = number

    def reset(self, record):
        if self.number == 2:
            raise OSError("no such game")
        return [ChatMessage("user", "?")]

    def step(self, action):
        return Step(0.0)

    def step_group(self, turns):
        assert turns[0][0] is self
        return [Step(float(len(turns)), parts={"number": env.number}) for env, _ in turns]


def test_the_others_do_not_wait_for_a_member_that_failed():
    group = group_of(Ranks(), 3)
    assert [one.status for one in group.members] == [FINISHED, ABORTED, FINISHED]
    assert rewards(group) == [2.0, 0.0, 2.0] and "no such game" in group.detail
