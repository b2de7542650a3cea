"""Guess a number from 1 to 7 in three turns; after a wrong guess the environment says whether it is higher or lower.

Halving the range always finds the number in three turns; guessing without listening finds it in three of seven cases.
"""

import random

from streamrl import ChatMessage, SingleTurnTask, Step

NUM_TURNS = 3


class GuessEnv:
    """One game. A fresh one is made for each episode, so it may keep what has happened."""

    def reset(self, record):
        self.number, self.turn = record["number"], 0
        # The tiny model has a token for each character of the prompt, so the prompt shows all that will be said.
        return [ChatMessage("user", "1234567 +-?")]

    def step(self, action):
        self.turn += 1
        if action == str(self.number):
            return Step(reward=1.0)
        if self.turn == NUM_TURNS:
            return Step(reward=0.0)
        hint = "?" if not action.isdigit() else "+" if self.number > int(action) else "-"
        return Step(reward=0.0, done=False, messages=[ChatMessage("user", hint)])


class Guess(SingleTurnTask):
    """A task of one's own environment: `record` makes the game, `env` plays it."""

    name = "guess"

    def record(self, split, index):
        return {"number": random.Random(f"{split}-{index}").randint(1, 7)}

    def env(self):
        return GuessEnv()
