r"""Text games in the form of Gymnasium and GEM, without a package: observations and actions are texts.

An action is what stands in the last \boxed{...} of a turn, or else the whole turn. A won game earns 1, everything else
0; env.max_turns says how many turns a game may have:

    streamrl launch experiment=games env.path=examples/tasks/games.py env.options.game=maze
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from envs.adapters.gymnasium_text import NUM_TEST, NUM_TRAIN, GymnasiumEnv, SeededTask, TextEnv
from envs.rewards.extract import last_boxed
from envs.thoughts import spoken
from streamrl.environment import Record
from streamrl.errors import TaskError

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
Cell = tuple[int, int]
Answer = tuple[str, float, bool, bool, dict[str, Any]]


class Game(TextEnv, Protocol):
    """A game that knows how it is won."""

    def solution(self) -> str:
        """One action that wins at once after `reset`."""
        ...


class GameTask(SeededTask):
    """A game for each seed.

    Args:
        name: of the task.
        make: a fresh game.
        num_train, num_test: seeds per split.
    """

    def __init__(self, name: str, make: Callable[[], Game], num_train: int, num_test: int) -> None:
        super().__init__(name, lambda: GymnasiumEnv(make(), name), num_train, num_test)
        self._make_game = make

    def target(self, record: Record) -> str:
        """The action that wins in one turn: who knows it need not explore."""
        game = self._make_game()
        game.reset(seed=record["seed"])
        return f"\\boxed{{{game.solution()}}}"


def action_of(turn: str) -> str:
    r"""The last \boxed{...}, else everything."""
    boxed = last_boxed(spoken(turn))
    return turn.strip() if boxed is None else boxed


class GuessNumber:
    """A number from 1 to `max_number`; every guess is answered with larger or smaller."""

    def __init__(self, max_number: int) -> None:
        self._max = max_number
        self._number = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self._number = random.Random(f"guess {seed}").randint(1, self._max)
        return f"I think of a whole number from 1 to {self._max}. Guess it, as \\boxed{{number}}.", {}

    def step(self, action: str) -> Answer:
        guess = action_of(action)
        if not guess.isascii() or not guess.isdigit() or not 1 <= int(guess[:9]) <= self._max:
            return f"Give one whole number from 1 to {self._max}, as \\boxed{{number}}.", 0.0, False, False, {}
        if int(guess) == self._number:
            return "Right.", 1.0, True, False, {}
        way = "larger" if self._number > int(guess) else "smaller"
        return f"My number is {way} than {int(guess)}.", 0.0, False, False, {}

    def solution(self) -> str:
        return str(self._number)


class Maze:
    """A maze of `size` times `size` cells with exactly one way between any two; the map is shown after every turn."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: set[tuple[Cell, Cell]] = set()
        self._at: Cell = (0, 0)
        self._goal: Cell = (0, 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        rng = random.Random(f"maze {self._size} {seed}")
        self._at = rng.randrange(self._size), rng.randrange(self._size)
        self._open, way = set(), [self._at]
        order = [self._at]
        while way:  # a random walk that never enters a cell twice, and goes back where it cannot go on
            free = [cell for cell in self._around(way[-1]) if cell not in order]
            if not free:
                way.pop()
                continue
            cell = rng.choice(free)
            self._open |= {(way[-1], cell), (cell, way[-1])}
            way.append(cell)
            order.append(cell)
        self._goal = order[-1]
        return (
            "You are at A in a maze and want to reach G; # is a wall. Give your moves as letters: U up, D down, L "
            f"left, R right, each one cell, as \\boxed{{RRD}}.\n{self._map()}"
        ), {}

    def step(self, action: str) -> Answer:
        moves = action_of(action).upper().replace(" ", "")
        if not moves or not set(moves) <= set(MOVES):
            return "Give your moves as letters U, D, L and R, as \\boxed{RRD}.", 0.0, False, False, {}
        for number, move in enumerate(moves, 1):
            cell = self._at[0] + MOVES[move][0], self._at[1] + MOVES[move][1]
            if (self._at, cell) not in self._open:
                return f"Move {number}, {move}, runs into a wall. You are here:\n{self._map()}", 0.0, False, False, {}
            self._at = cell
            if cell == self._goal:
                return "You have reached G.", 1.0, True, False, {}
        return f"You are here:\n{self._map()}", 0.0, False, False, {}

    def solution(self) -> str:
        ways: dict[Cell, str] = {self._at: ""}
        waiting = [self._at]
        for cell in waiting:
            for move, (down, right) in MOVES.items():
                other = cell[0] + down, cell[1] + right
                if (cell, other) in self._open and other not in ways:
                    ways[other] = ways[cell] + move
                    waiting.append(other)
        return ways[self._goal]

    def _around(self, cell: Cell) -> list[Cell]:
        cells = [(cell[0] + down, cell[1] + right) for down, right in MOVES.values()]
        return [one for one in cells if min(one) >= 0 and max(one) < self._size]

    def _map(self) -> str:
        """Walls between cells are places of their own: 2 * size + 1 lines."""
        grid = [["#"] * (2 * self._size + 1) for _ in range(2 * self._size + 1)]
        for row in range(self._size):
            for column in range(self._size):
                grid[2 * row + 1][2 * column + 1] = "."
        for (row, column), (to_row, to_column) in self._open:
            grid[row + to_row + 1][column + to_column + 1] = "."
        for letter, (row, column) in (("G", self._goal), ("A", self._at)):
            grid[2 * row + 1][2 * column + 1] = letter
        return "\n".join(map("".join, grid))


def guess_number(*, max_number: int = 20, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST) -> GameTask:
    """A game: guess a number; each guess is answered with larger or smaller. Needs env.max_turns.

    Raises TaskError for less than two numbers.
    """
    if not 2 <= max_number <= 1_000_000:
        raise TaskError(f"max_number={max_number} must lie between 2 and 1000000.")
    return GameTask("game.guess_number", lambda: GuessNumber(max_number), num_train, num_test)


def maze(*, size: int = 4, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST) -> GameTask:
    """A game: walk through a maze that is shown as a map, in one turn or several.

    Raises TaskError for a size that no prompt could hold.
    """
    if not 2 <= size <= 20:
        raise TaskError(f"size={size} must lie between 2 and 20.")
    return GameTask("game.maze", lambda: Maze(size), num_train, num_test)


GAMES: dict[str, Callable[..., GameTask]] = {"guess_number": guess_number, "maze": maze}


def task(*, game: str = "guess_number", **options: Any) -> GameTask:
    """The task that `env.path` makes of this file; `options` are those of the game."""
    if game not in GAMES:
        raise TaskError(f"game={game} is unknown: choose one of {', '.join(GAMES)}.")
    return GAMES[game](**options)
