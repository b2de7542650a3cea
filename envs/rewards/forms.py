"""Rewards for how an answer is written, to be given a small weight beside one for what it says."""

from __future__ import annotations

from collections.abc import Sequence

from envs.data.shapes import RecordShape
from envs.rewards.extract import ANSWER_TAGS, has_format
from envs.rewards.repetition import repeats_itself
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Record


class Tags:
    """1 if every tag of reward.format_tags stands there once, in order, and the last one ends the completion."""

    reads_answer = False

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._tags = settings.format_tags or ANSWER_TAGS

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return float(has_format(completion.rstrip(), self._tags))


class Repetition:
    """-1 for a completion that repeats itself, else 0."""

    reads_answer = False

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        pass

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return -float(repeats_itself(completion))


class Length:
    """A penalty on length, 0 to -1: the share of reward.length_chars that a completion uses, in characters."""

    reads_answer = False

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._limit = settings.length_chars

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return -min(1.0, len(completion) / self._limit)
