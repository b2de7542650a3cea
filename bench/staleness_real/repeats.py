"""A task of long answers with one reward at their end: three letters, to be written 34 times in a row."""

from __future__ import annotations

import random
from itertools import permutations

from streamrl import Record, SingleTurnTask, Step

NUM_REPEATS = 34
_QUESTIONS = ["".join(letters) for letters in permutations("abcdefgh", 3)]
random.Random(0).shuffle(_QUESTIONS)
_SPLITS = {"train": _QUESTIONS[:280], "test": _QUESTIONS[280:]}


class Repeats(SingleTurnTask):
    """The reward is the share of right letters, over the longer of the answer and 102."""

    name = "repeats"
    num_train, num_test = len(_SPLITS["train"]), len(_SPLITS["test"])

    def record(self, split: str, index: int) -> Record:
        return {"prompt": _SPLITS["train" if split == "train" else "test"][index]}

    def target(self, record: Record) -> str:
        return record["prompt"] * NUM_REPEATS

    def reward(self, record: Record, completion: str) -> Step:
        right = self.target(record)
        same = sum(a == b for a, b in zip(right, completion, strict=False))
        return Step(reward=same / max(len(right), len(completion)))
