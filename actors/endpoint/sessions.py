"""Sessions of agents: one for each episode, named by its key, from the start of the agent to its end.

    opened      the episode began: the key serves its client
    over        the agent has ended, or its lease is gone: calls that still run are canceled, the key is refused

An SDK repeats a call whose answer did not arrive. The same body from a client that has gone, or marked as repeated,
gets the answer of the first call: it is generated, and trained on, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.trajectory.chat_form import Chat, ChatCompletion
from streamrl.environment import AgentSession

MAX_ENDED_KEYS = 10_000
"""Keys of sessions that are over, kept to tell them from wrong ones."""
MAX_KEPT = 1000
"""Calls whose answers a session keeps, the last ones."""


class SessionClient(Protocol):
    """What a session serves: `actors.trajectory.client.Client`."""

    tokenizer: Any
    chat: Chat
    full: str
    max_tokens: int

    @property
    def sampling(self) -> Mapping[str, Any]: ...

    def count(self, messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] = ()) -> int: ...


class Keys(Protocol):
    """What a server asks: `Sessions`, or those of `streamrl serve`."""

    def get(self, key: str) -> Session | None: ...

    def is_over(self, key: str) -> bool: ...


class Asker(Protocol):
    """Tells whether the client that asked is still there."""

    def gone(self) -> bool: ...


@dataclass(slots=True)
class Answer:
    """A generation that one or several equal requests wait for."""

    task: asyncio.Task[ChatCompletion]
    asker: Asker
    delivered: bool = False

    def repeated(self, *, marked: bool) -> bool:
        """Whether another request with its body is the same call again, and not another call."""
        if self.task.done() and (self.task.cancelled() or self.task.exception() is not None):
            return False
        return marked or (not self.delivered and self.asker.gone())


@dataclass(slots=True, eq=False, kw_only=True)
class Session(AgentSession):
    """Attributes:
        recorded: whether calls are turns of a trajectory.
    """

    client: SessionClient
    recorded: bool = True
    over: bool = False
    answers: dict[bytes, Answer] = field(default_factory=dict)
    conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def ask(self, body: bytes, options: Mapping[str, Any], asker: Asker, *, marked: bool) -> Answer:
        """The answer to this call, which may be one that is under way or was lost; `marked`: a repetition, it says."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        known = self.answers.get(digest)
        if known is None or not known.repeated(marked=marked):
            known = Answer(asyncio.ensure_future(self._create(options)), asker)
            self.answers[digest] = known
            _trim(self.answers)
        known.asker, known.delivered = asker, False
        return known

    async def _create(self, options: Mapping[str, Any]) -> ChatCompletion:
        completion = await self.client.chat.create(**options)
        self.answer = completion.choices[0].message.content
        return completion

    def remember(self, response: str, conversation: list[dict[str, Any]]) -> None:
        """Keep the conversation up to an answer, for a call that goes on from it by name."""
        self.conversations[response] = conversation
        _trim(self.conversations)

    def end(self) -> None:
        self.over, self.full = True, self.client.full
        for one in self.answers.values():
            one.task.cancel()


def _trim(kept: dict[Any, Any]) -> None:
    if len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]


class Sessions:
    """The sessions of an actor by their keys."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: dict[str, None] = {}

    def begin(self, client: SessionClient, base_url: str) -> Session:
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._open[key] = session = Session(base_url, key, client=client)
        return session

    def end(self, session: Session) -> None:
        self._open.pop(session.api_key, None)
        self._ended[session.api_key] = None
        if len(self._ended) > MAX_ENDED_KEYS:
            del self._ended[next(iter(self._ended))]
        session.end()

    def get(self, key: str) -> Session | None:
        return self._open.get(key)

    def is_over(self, key: str) -> bool:
        return key in self._ended
