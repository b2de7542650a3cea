"""Rewards for how an answer is written, to be given a small weight beside one for what it says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from envs.data.shapes import RecordShape
from envs.rewards.extract import ANSWER_TAGS, has_format
from envs.rewards.thoughts import whole
from streamrl.config.schema import RewardConfig
from streamrl.environment import ChatMessage, Record

NGRAMS = range(8, 17)
MAX_NGRAM_REPEATS, MAX_SENTENCE_REPEATS, SENTENCE_WORDS = 6, 4, 8


class Tags:
    """1 if every tag of reward.format_tags stands there once, in order, and the last one ends the completion."""

    reads_answer = False

    def __init__(self, settings: RewardConfig, shape: RecordShape) -> None:
        self._tags = settings.format_tags or ANSWER_TAGS

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> float:
        return float(has_format(whole(completion).rstrip(), self._tags))


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


def repeats_itself(text: str) -> bool:
    """An n-gram of 8 to 16 words occurs 6 times or more, or a sentence of more than 8 words 4 times or more."""
    words = text.split()
    for size in NGRAMS:
        grams = Counter(zip(*(words[start:] for start in range(size)), strict=False))
        if grams and max(grams.values()) >= MAX_NGRAM_REPEATS:
            return True
    sentences = Counter(part.strip() for part in re.split(r"[.!?\n]", text) if len(part.split()) > SENTENCE_WORDS)
    return bool(sentences) and max(sentences.values()) >= MAX_SENTENCE_REPEATS
