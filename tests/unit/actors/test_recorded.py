"""Recorded answers are played again: equal rewards, other ones, and those that cannot be checked."""

import json

import pytest

from actors.recorded import Checked, RewardCheck
from envs.rewards.services import MODEL_PART
from streamrl.environment import SingleTurnTask, Step
from streamrl.messages import Group
from streamrl.messages.codec import encode
from streamrl.stream.records import GroupArrived
from tests.kit.loops import run
from tests.unit.actors.fakes import make_runner
from tests.unit.actors.test_group_step import group_of, played

LENGTHS = "def reward(prompts, completions, **kwargs):\n    return [{}] * len(completions)\n"


def check(task, group: Group) -> Checked:
    found = []

    async def work():
        checker = RewardCheck(task, make_runner(task, None))
        found.append(await checker.check([GroupArrived("a", 1, 1, group.group_id, 0, bytes(encode(group)))]))

    run(work)
    return found[0]


class Letters(SingleTurnTask):
    """Pays for letters, what of it the test says; its prompt can change."""

    prompt, paid = "abc", "ab"

    def record(self, split, index):
        return {"prompt": self.prompt}

    def reward(self, record, completion):
        return float(completion[:1] in self.paid)


@pytest.mark.parametrize(("prompt", "paid", "outcome"), [
    ("abc", "ab", (3, 0, 0)), ("abc", "abc", (2, 1, 0)), ("other", "ab", (0, 0, 3)),
])
def test_each_answer_is_equal_or_named(prompt, paid, outcome):
    task = Letters()
    task.num_train = 1
    group = recorded(task)
    task.prompt, task.paid = prompt, paid
    found = check(task, group)
    assert (found.num_equal, len(found.differing), len(found.unchecked)) == outcome
    if found.differing:
        assert "member 2 of a, prompt 0: reward 0 then, 1 now" in found.differing[0]
    if found.unchecked:
        assert "the input of turn 1 is another than was recorded" in found.unchecked[0]


class Measured(Letters):
    """A reward that is measured, and comes out a little different each time."""

    apart, part = 0.0, MODEL_PART

    def reward(self, record, completion):
        score = 4.0 + self.apart
        return Step(reward=score, parts={self.part: score})


@pytest.mark.parametrize(("part", "apart", "outcome"), [
    (MODEL_PART, 0.0, (3, 0, 0)), (MODEL_PART, -6e-6, (3, 0, 0)), (MODEL_PART, 3e-4, (3, 0, 0)),
    (MODEL_PART, 0.01, (0, 0, 3)), (MODEL_PART, -0.9, (0, 0, 3)), (MODEL_PART, 2.0, (0, 3, 0)),
    ("my_own", 6e-6, (0, 3, 0)), ("my_own", 0.0, (3, 0, 0)),
])
def test_scores_of_a_reward_model_are_compared_within_rounding_and_all_others_exactly(part, apart, outcome):
    task = Measured()
    task.num_train, task.part = 1, part
    group = recorded(task)
    task.apart = apart
    found = check(task, group)
    assert (found.num_equal, len(found.differing), len(found.unchecked)) == outcome
    assert all("by a reward model" in line for line in found.unchecked)


def recorded(task) -> Group:
    from tests.unit.actors import test_group_step

    before, test_group_step.RECORD = test_group_step.RECORD, json.loads(json.dumps(task.record("train", 0)))
    try:
        return group_of(task, 3)
    finally:
        test_group_step.RECORD = before


def test_answers_that_are_scored_together_are_again(tmp_path):
    from envs.registry import task_of
    from streamrl.config.load import from_plain
    from tests.unit.actors.test_group_step import BASE

    group = played(tmp_path, LENGTHS.format("len(completions)"))
    words = [f"env.path={tmp_path}/reward.py", f"data.path={tmp_path}/train.jsonl", "data.test_ratio=0"]
    found = check(task_of(from_plain(BASE, words)), group)
    assert (found.num_equal, found.differing, found.unchecked) == (4, [], [])
