"""Text games of `examples/tasks`: rules, maps and ways to the goal."""

import pytest

from envs.check import check_task
from envs.registry import load_task
from examples.tasks.games import Maze
from streamrl.environment import Step, Task
from streamrl.errors import TaskError


def task_of(game: str, **options: object) -> Task:
    return load_task("", path="examples/tasks/games.py", options={"game": game, **options})


def play(game: str, *actions: str, seed: int = 5, **options: object) -> list[Step]:
    env = task_of(game, **options).env()
    env.reset({"seed": seed})
    return [env.step(action) for action in actions]  # type: ignore[misc]


def said(step: Step) -> str:
    return step.messages[0].content


def test_guesses_are_answered_until_one_is_right() -> None:
    task = task_of("guess_number", max_number=9)
    check_task(task)
    seed = next(n for n in range(99) if task.target({"seed": n}) == "\\boxed{5}")  # type: ignore[attr-defined]
    guesses = "2", "I say \\boxed{8}", "eleven", "\\boxed{5}"
    low, high, none, right = play("guess_number", *guesses, seed=seed, max_number=9)
    assert (said(low), said(high)) == ("My number is larger than 2.", "My number is smaller than 8.")
    assert "whole number from 1 to 9" in said(none) and right.done and right.reward == 1.0
    assert [step.reward for step in (low, high, none)] == [0.0] * 3


def test_a_maze_is_walked_in_one_turn_or_in_several() -> None:
    task = task_of("maze", size=5)
    check_task(task)
    way = task.target({"seed": 5})  # type: ignore[attr-defined]
    (won,) = play("maze", way, size=5)
    assert won.done and won.reward == 1.0
    letters = way.removeprefix("\\boxed{").rstrip("}")
    *steps, last = play("maze", *letters.lower(), size=5)
    assert len(letters) > 3 and last.reward == 1.0 and not any(step.reward or step.done for step in steps)


def test_walls_stop_a_walk_where_it_is_and_other_letters_are_refused() -> None:
    maze = Maze(3)
    maze.reset(seed=1)
    answer, reward, done, *_ = maze.step("UUUU")  # three rows: the fourth is beyond the border, if not the first
    assert "U, runs into a wall. You are here:" in answer and (reward, done) == (0.0, False)
    assert "letters U, D, L and R" in maze.step("north")[0]


def test_every_maze_has_a_way_and_the_map_shows_it() -> None:
    for seed in range(20):
        maze = Maze(4)
        text, _ = maze.reset(seed=seed)
        grid = text.splitlines()[1:]
        row, column = next((r, line.index("A")) for r, line in enumerate(grid) if "A" in line)
        for move in maze.solution():
            down, right = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}[move]
            assert grid[row + down][column + right] == "."
            row, column = row + 2 * down, column + 2 * right
        assert grid[row][column] == "G"


@pytest.mark.parametrize(
    ("game", "option"), [("guess_number", "max_number"), ("maze", "size"), ("maze", "width"), ("chess", "game")]
)
def test_bad_options_are_refused(game: str, option: str) -> None:
    with pytest.raises(TaskError, match=option):
        task_of(game, **({} if option == "game" else {option: 1}))
