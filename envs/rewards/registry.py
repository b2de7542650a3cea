"""`reward.type` becomes a reward function for the records of `data.path`.

A reward gets the record, the completion and the conversation before it. `envs.data.shapes` reads a record's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envs.data.shapes import RecordShape
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Record, RewardFunction
from streamrl.extension import resolve


class Exact:
    """1 if the completion is the record's answer but for white space around it, else 0."""

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._shape = shape

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return float(completion.strip() == str(self._shape.required_answer(record)).strip())


REWARDS: dict[str, Callable[[RewardConfig, RecordShape], RewardFunction]] = {"exact": Exact}


def make_reward(settings: RewardConfig, shape: RecordShape) -> RewardFunction:
    """The reward that `reward.type` names. Raises ConfigError for an unknown name."""
    assert settings.type is not None, "reward.type is not set"
    return resolve(settings.type, REWARDS, setting="reward.type")(settings, shape)
