"""A fake of the GEM package: `make(id, **options)` and one game with the methods of its environments."""

import random


class Env:
    def __init__(self, max_number: int = 20):
        self.max_number = max_number

    def reset(self, seed=None):
        random.seed(seed)
        self.number = random.randint(1, self.max_number)
        return f"Guess the number, 1 to {self.max_number}.", {"suffix": "Enter your next guess."}

    def step(self, action):
        if action == f"\\boxed{{{self.number}}}":
            return "Right.", 1.0, True, False, {}
        return "No.", 0.0, False, False, {}


def make(env_id, **options):
    if env_id != "game:GuessTheNumber-v0-easy":
        raise ValueError(f"{env_id} is not registered")
    return Env(**options)
