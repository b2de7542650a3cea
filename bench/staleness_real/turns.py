"""A task whose turns have rewards of their own: eight letters asked for one by one, each of which earns 1/8 at once."""

from __future__ import annotations

import random

from streamrl import ChatMessage, Record, SingleTurnTask, Step

LETTERS = "abcdefgh"
NUM_TURNS = 8


class TurnsEnv:
    """An episode that asks for the next letter whatever the answer to the last one was."""

    def reset(self, record: Record) -> list[ChatMessage]:
        self._asked, self._turn = record["asked"], 0
        # The tiny model has a token for each character of the prompt, so the prompt shows all that will be said.
        return [ChatMessage("user", f"{LETTERS} {self._asked[0]}")]

    def step(self, action: str) -> Step:
        right = LETTERS[-1 - LETTERS.index(self._asked[self._turn])]
        self._turn += 1
        reward = float(action == right) / NUM_TURNS
        if self._turn == NUM_TURNS:
            return Step(reward=reward)
        return Step(reward=reward, done=False, messages=[ChatMessage("user", self._asked[self._turn])])


class Turns(SingleTurnTask):
    """The right answer to a letter is its mirror image in the alphabet."""

    name = "turns"

    def record(self, split: str, index: int) -> Record:
        return {"asked": "".join(random.Random(f"{split}-{index}").choices(LETTERS, k=NUM_TURNS))}

    def env(self) -> TurnsEnv:
        return TurnsEnv()
