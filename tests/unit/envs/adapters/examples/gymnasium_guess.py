import random


class GuessEnv:
    """Guess a number from 1 to 9 in three turns."""

    def __init__(self, highest: int = 9):
        self.highest = highest

    def reset(self, *, seed=None, options=None):
        self.number = random.Random(seed).randint(1, self.highest)
        self.turns = 0
        return f"Guess a number from 1 to {self.highest}.", {}

    def step(self, action):
        self.turns += 1
        guess = int(action) if action.strip().isdigit() else 0
        terminated, truncated = guess == self.number, self.turns == 3
        hint = "lower" if guess > self.number else "higher"
        return hint, float(terminated), terminated, truncated, {}


num_train, num_test = 100, 10
