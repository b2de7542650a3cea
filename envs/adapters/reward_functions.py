"""Reward functions of RL2's fork and of rl4llm.

Those of rl4llm have `name` and `__call__(messages, ground_truth, **kwargs) -> float`, with `reward_transform_fn`.

They are called once, when an episode is over. Several need a function `reward_transform_fn`, which makes one reward of
them: it gets each function's rewards under its name, [N], and returns [N]. Episodes are scored one by one as they end,
so N is 1.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.async_compat import call
from envs.data.shapes import RecordShape, tool_schemas
from envs.reward_values import as_step, number
from streamrl.environment import ROLES, ChatMessage, Record, RewardFunction, Step
from streamrl.errors import TaskError

WANTED = 'return a list of {"role": ..., "content": ...}; an empty list ends the conversation'


class DialogueEnv:
    """A conversation with `interact(messages)`, of the enhanced fork of RL2.

    It gets the conversation and returns the messages that follow, e.g. the results of tools; an empty list ends it.
    In the last allowed turn it is not called.

    Args:
        reward: scores it: called with the record, the model's last words and all messages before them.
        interact: the user's function, plain or async.
        name: the file, for messages.
        tools: JSON schemas for the chat template; a record's own come first.
    """

    def __init__(
        self, reward: RewardFunction, interact: Callable[[list[dict[str, str]]], Any], name: str, shape: RecordShape,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._reward, self._interact, self._name, self._shape = reward, interact, name, shape
        self._file_tools = tools
        self.tools: Sequence[Mapping[str, Any]] = tools
        self._record: Record = {}
        self._messages: list[ChatMessage] = []
        self._before: list[ChatMessage] = []

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        self._record, self._messages = copy.deepcopy(record), list(self._shape.messages(record))
        self.tools = tool_schemas(record) or self._file_tools
        return list(self._messages)

    async def step(self, action: str) -> Step:
        self._before = self._messages
        conversation = [*self._messages, ChatMessage("assistant", action)]
        said = [message.as_dict() for message in conversation]
        more = self._checked(await call(self._interact, said))
        if not more:
            return await self._scored(action)
        self._messages = [*conversation, *more]
        return Step(0.0, done=False, messages=more)

    async def last_step(self, action: str) -> Step:
        """Score the conversation without calling `interact`."""
        return await self._scored(action)

    async def cut_step(self, action: str) -> Step:
        """Score the conversation without the answer of `interact`: it ends with the model's words."""
        self._messages = self._before
        return await self._scored(action)

    async def _scored(self, action: str) -> Step:
        """The reward of the conversation that ends with this action."""
        return as_step(await call(self._reward, self._record, action, self._messages), f"{self._name}: reward_fn")

    def _checked(self, more: Any) -> list[ChatMessage]:
        if not isinstance(more, list | tuple):
            raise TaskError(f"{self._name}: interact returned {more!r:.80} ({type(more).__name__}): {WANTED}.")
        try:
            return [ChatMessage.of(message) for message in more]
        except TaskError as error:
            raise TaskError(
                f"{self._name}: interact returned a message that {error}; {WANTED}, with a text as content "
                f"and a role of {', '.join(ROLES)}."
            ) from error


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
