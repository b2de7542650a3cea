"""Conversion of the value that a user's reward function returned: a `Step`, or an error that shows the value."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from streamrl.environment import MAX_REWARD, Step
from streamrl.errors import TaskError

FORMS = "a number, True or False, or a dict of named parts"
MAIN = ("reward", "score")
NO_NUMBERS = (str, bytes, type(None), Mapping, Sequence, Set)
"""A part of one of these is none: a text for the log, as verl's functions return; or None, which does not apply."""
MAX_NAME_CHARS = 32


def as_step(value: Any, source: str) -> Step:
    """The end of an episode with this reward.

    Args:
        value: a number or bool; a list of one of these; a dict of named parts, whose reward is its entry "reward", else
            its entry "score", else their sum, and where what is no number counts for nothing; or a whole `Step`.
        source: what returned it, for the message.
    Raises:
        TaskError: anything else, not finite, or larger than a million.
    """
    if isinstance(value, Step):
        return value
    if isinstance(value, Mapping):
        return _step_of_parts(value, source)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != 1:
            raise TaskError(f"{source} returned {value!r:.80}, {len(value)} values for one answer: return {FORMS}.")
        return as_step(value[0], source)
    return Step(reward=number(value, source))


def entries_of_batch(value: Any, num: int, source: str) -> Sequence[Any]:
    """The entries that a batched reward returned for `num` completions. Raises TaskError for another number of them."""
    try:
        values = None if isinstance(value, str | bytes | Mapping) else list(value)
    except TypeError:
        values = None
    if values is None or len(values) != num:
        lists = "one completion" if num == 1 else f"{num} completions"
        raise TaskError(
            f"{source} takes `completions`, so it is called with lists and must return a list with one reward for "
            f"each: for {lists} it returned {value!r:.80}."
        )
    return values


def _step_of_parts(parts: Mapping[Any, Any], source: str) -> Step:
    if isinstance(agents := parts.get("agents"), Mapping):
        return _step_of_agents(agents, {name: one for name, one in parts.items() if name != "agents"}, source)
    if not parts:
        raise TaskError(f"{source} returned an empty dict: return {FORMS}.")
    main = next((name for name in MAIN if name in parts), None)
    values = {
        part_name(name, source): number(value, f"{source}, part {name!r},")
        for name, value in parts.items() if name == main or not isinstance(value, NO_NUMBERS)
    }
    if not values:
        raise TaskError(f"{source} returned {dict(parts)!r:.80}, which holds no number: return {FORMS}.")
    reward = sum(values.values()) if main is None else values[main]
    return Step(
        reward=number(reward, f"{source}: the sum of its parts"), score=values.get("score"),
        parts={name: value for name, value in values.items() if name not in MAIN},
    )


def _step_of_agents(agents: Mapping[Any, Any], parts: Mapping[Any, Any], source: str) -> Step:
    """Rewards of agents, which are parts too; a "reward" next to them counts on the last turn of all."""
    rewards = {str(name): number(one, f"{source}, agent {name!r},") for name, one in agents.items()}
    step = _step_of_parts({"reward": 0.0, **parts}, source)
    shown = {part_name(f"agent_{name}", source): one for name, one in rewards.items()}
    return replace(step, parts={**step.parts, **shown}, agents=rewards)


def part_name(name: Any, source: str) -> str:
    """The name as a plain text. Raises TaskError for one that messages cannot carry."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise TaskError(
            f"{source} returned a part named {name!r:.60}, expected 1 to {MAX_NAME_CHARS} printable characters"
        )
    return str.__str__(name)


def number(value: Any, source: str) -> float:
    """A finite number of a sane size. Raises TaskError showing the value and, where it is clear, the remedy."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that it was never awaited
        raise TaskError(f"{source} returned a coroutine: define the function itself with `async def`.")
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise TaskError(f"{source} returned a generator: it holds `yield` where `return` belongs; return {FORMS}.")
    if value is None:
        raise TaskError(f"{source} returned None: return {FORMS} (is a `return` missing?).")
    if isinstance(value, str | bytes):
        raise TaskError(f"{source} returned the text {value!r:.60}: return {FORMS}.")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TaskError(f"{source} returned {value!r:.60} ({type(value).__name__}): return {FORMS}.") from error
    if not math.isfinite(found):
        raise TaskError(f"{source} returned {found}: a reward must be a finite number.")
    if abs(found) > MAX_REWARD:
        raise TaskError(f"{source} returned {found:g}: beyond {MAX_REWARD:g} it is taken for a mistake; scale it.")
    return found
