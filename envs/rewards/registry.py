"""`reward.type` or `reward.weights` becomes a reward function for the records of `data.path`.

A reward gets the record, the completion and the conversation before it. `envs.data.shapes` reads a record's answer.
"""

from __future__ import annotations

from collections.abc import Callable

from envs.data.shapes import RecordShape
from envs.rewards.answers import Boxed, Exact, FreeMath, ThinkAnswerTags
from envs.rewards.code import Code
from envs.rewards.combined import combine
from envs.rewards.forms import Length, Repetition, Tags
from envs.rewards.services import Judge, reward_model
from streamrl.config.schema import RewardConfig
from streamrl.environment import RewardFunction
from streamrl.errors import ConfigError
from streamrl.extension import resolve

MakeReward = Callable[[RewardConfig, RecordShape], RewardFunction]
REWARDS: dict[str, MakeReward] = {
    "exact": Exact,
    "math": FreeMath,
    "boxed": Boxed,
    "think_answer_tags": ThinkAnswerTags,
    "code": Code,
    "tags": Tags,
    "length": Length,
    "repetition": Repetition,
    "judge": Judge,
    "model": reward_model,
}


def make_reward(settings: RewardConfig, shape: RecordShape) -> RewardFunction:
    """The reward that `reward.type` names, or the weighted sum of those in `reward.weights`.

    Raises ConfigError: an unknown name, or both settings at once.
    """
    if not settings.weights:
        assert settings.type is not None, "neither reward.type nor reward.weights is set"
        return resolve(settings.type, REWARDS, setting="reward.type")(settings, shape)
    if settings.type is not None:
        raise ConfigError(
            f"reward.type={settings.type} and reward.weights are both set: leave one of them out, or put "
            f"{settings.type} into reward.weights."
        )
    rewards = {
        name: resolve(name, REWARDS, setting="reward.weights")(settings, shape) for name in settings.weights
    }
    return combine(rewards, settings.weights)
