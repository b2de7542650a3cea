"""`reward_fn(messages, answer)` with `interact(messages)`, of the enhanced fork of RL2.

`interact` gets the conversation and returns the messages that follow, e.g. the results of tools; an empty list ends it.
`reward_fn` then scores the whole conversation, once. In the last allowed turn `interact` is not called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.async_compat import call
from envs.data.shapes import RecordShape, tool_schemas
from envs.reward_values import as_step
from streamrl.environment import ROLES, ChatMessage, Record, RewardFunction, Step
from streamrl.errors import TaskError

WANTED = 'return a list of {"role": ..., "content": ...}; an empty list ends the conversation'


class DialogueEnv:
    """One conversation.

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
