"""Rewards of rl4llm: `name` and `__call__(messages, ground_truth, **kwargs) -> float`, with `reward_transform_fn`.

They are called once, when an episode is over. Several need a function `reward_transform_fn`, which makes one reward of
them: it gets each function's rewards under its name, [N], and returns [N]. Episodes are scored one by one as they end,
so N is 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.data.shapes import RecordShape
from envs.reward_values import number
from streamrl.environment import ChatMessage, Record, Step
from streamrl.errors import TaskError

NAME = re.compile(r"[a-zA-Z0-9_-]+")


class RewardFunctions:
    """All rewards of a file as one; each is logged under its name.

    Args:
        functions: the rewards.
        transform: makes one of several; None if there is only one.
        file: its name, for messages.
        shape: reads the right answer of a record.
    Raises:
        TaskError: a name that is no name or stands twice, or several functions without `transform`.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], transform: Callable[[dict[str, Any]], Any] | None, file: str,
        shape: RecordShape,
    ) -> None:
        self.name = file
        self._transform, self._shape = transform, shape
        self._functions = {_name_of(function, file): function for function in functions}
        if len(self._functions) < len(functions):
            raise TaskError(f"{file}: two rewards have the same name ({', '.join(self._functions)}): give one another.")
        if len(functions) > 1 and transform is None:
            raise TaskError(
                f"{file} defines {len(functions)} rewards ({', '.join(self._functions)}) and lacks "
                "reward_transform_fn(rewards): define it, it makes one reward of them."
            )

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Step:
        answer = self._shape.answer(record)
        parts = {}
        for name, function in self._functions.items():
            # Each gets a list of its own, which it may change.
            value = function([*prompt, ChatMessage("assistant", str(completion))], answer)
            if not isinstance(value, int | float):
                raise TaskError(f"{self.name}: the reward {name} returned {value!r:.60}: it must be an int or a float.")
            parts[name] = number(value, f"{self.name}: the reward {name}")
        reward = next(iter(parts.values())) if self._transform is None else self._transformed(parts)
        return Step(reward, parts=parts)

    def _transformed(self, parts: Mapping[str, float]) -> float:
        assert self._transform is not None
        result = self._transform({name: _vector(value) for name, value in parts.items()})
        shape = tuple(getattr(result, "shape", (len(result),) if isinstance(result, list | tuple) else ()))
        if shape != (1,):
            raise TaskError(
                f"{self.name}: reward_transform_fn returned {result!r:.60} with the shape {shape}: it must return one "
                "reward for each that it got, here (1,)."
            )
        return number(result[0], f"{self.name}: reward_transform_fn")


def _vector(value: float) -> Any:
    """One reward as a tensor, if the file uses them; this package itself does without torch."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.tensor([value], dtype=torch.float32)
    import numpy

    return numpy.array([value], dtype=numpy.float32)


def _name_of(function: Any, file: str) -> str:
    name = getattr(function, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise TaskError(
            f"{file}: the reward {type(function).__name__} has the name {name!r:.60}: give it one of letters, digits, "
            "_ and -, as in super().__init__('accuracy')."
        )
    return name
