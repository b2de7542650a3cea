"""Rewards of a user by `module:attribute`: functions as in a file, factories, and what is neither."""

import asyncio
import sys
from functools import partial

import pytest

from envs.async_compat import call
from envs.data.shapes import RecordShape
from envs.reward_file import reward_from_module
from envs.reward_values import as_step
from envs.rewards.registry import make_reward
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage
from streamrl.errors import ConfigError

pytestmark = pytest.mark.timeout(60)

OWN_REWARDS = """
def short(completion, answer, record, question):
    return float(len(completion) < 3 and question == record["question"])

async def like_trl(prompts, completions, answer, **kwargs):
    return [float(one == right) for one, right in zip(completions, answer)]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "read": 1.0}

def factory(settings, shape):
    return lambda record, completion, prompt: settings.correct * (completion == shape.answer(record))

def number(settings, shape):
    return 1.0

def fails(settings, shape):
    raise LookupError("no such model")

def three(first, second, third):
    return 1.0
"""


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_a_user.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "rewards_of_a_user"
    sys.modules.pop("rewards_of_a_user", None)


@pytest.mark.parametrize("name", ["short", "like_trl", "verl", "factory"])
@pytest.mark.parametrize("form", ["type", "weights"])
def test_a_function_in_a_module_is_a_reward_as_in_a_file(own_rewards, name, form):
    named = f"{own_rewards}:{name}"
    settings = RewardConfig(type=named) if form == "type" else RewardConfig(weights={named: 1.0, "length": 0.0})
    shape = RecordShape(None, None)
    reward = make_reward(settings, shape, None, partial(reward_from_module, shape))
    record = {"question": "1 + 1", "answer": "2", "data_source": "sums"}

    def value(completion: str) -> float:
        return as_step(asyncio.run(call(reward, record, completion, [ChatMessage("user", "1 + 1")])), name).reward

    assert (value("2"), value("not this")) == (1.0, 0.0)


@pytest.mark.parametrize(("name", "says"), [
    ("number", "it gave 1.0, which scores nothing"), ("fails", "LookupError: no such model"), ("three", "TypeError"),
])
@pytest.mark.parametrize("form", ["type", "weights"])
def test_what_makes_no_reward_is_told_with_the_forms_that_do(own_rewards, name, says, form):
    named = f"{own_rewards}:{name}"
    settings = RewardConfig(type=named) if form == "type" else RewardConfig(weights={named: 1.0, "length": 0.0})
    with pytest.raises(ConfigError, match=rf"reward {named} cannot be made: {says}.*function of messages"):
        make_reward(settings, RecordShape(None, None))
