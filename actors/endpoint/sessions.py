"""Sessions of agents: one for each episode, named by its key, from the start of the agent to its end.

    opened      the episode began: the key serves its client; a program outside may take it (`env.agent=outside`)
    over        the agent has ended, or its lease is gone: calls that still run are canceled, the key is refused

An SDK repeats a call whose answer did not arrive. The same body from a client that has gone, or marked as repeated,
gets the answer of the first call: it is generated, and trained on, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from actors.trajectory.chat_form import ChatCompletion, Kept
from actors.trajectory.client import Client
from envs.thoughts import TAIL, heard
from streamrl.environment import AgentSession, Record
from streamrl.errors import TaskError

MAX_ENDED_KEYS = 10_000
"""Keys and names of sessions that are over, kept to tell them from wrong ones."""
HEARTBEAT_S = 5.0
"""While an episode waits for a program outside, its lease is told to be alive."""
BYTES_PER_TOKEN = 100
"""About what a kept answer takes for each token of it and of its prompt: ids and log-probs are objects."""


@dataclass(slots=True, eq=False)
class Answer:
    """A generation that one or several equal requests wait for; `gone`: whether the last client that asked is."""

    task: asyncio.Task[ChatCompletion]
    gone: Callable[[], bool]
    delivered: bool = False
    num_bytes: int = 0

    def repeated(self, *, marked: bool) -> bool:
        """Whether another request with its body is the same call again, and not another call."""
        if self.task.done() and (self.task.cancelled() or self.task.exception() is not None):
            return False
        return marked or (not self.delivered and self.gone())


@dataclass(slots=True, eq=False, kw_only=True)
class Session(AgentSession):
    """Attributes:
        recorded: whether calls are turns of a trajectory.
        ended: says why the program outside failed, or ""; None for an agent that the run starts.
    """

    client: Client
    recorded: bool = True
    id: str = ""
    offers: Offers | None = None
    record: Record = field(default_factory=dict)
    ended: asyncio.Future[str] | None = None
    over: bool = False
    asked: dict[bytes, list[Answer]] = field(default_factory=dict)  # calls that are under way, by their bodies
    answers: Kept[bytes, list[Answer]] = field(default_factory=Kept)
    conversations: Kept[str, list[dict[str, Any]]] = field(default_factory=Kept)

    def ask(self, body: bytes, options: Mapping[str, Any], gone: Callable[[], bool], *, marked: bool) -> Answer:
        """The answer to this call, which may be one that is under way or was lost; `marked`: a repetition, it says.

        Of several with this body, as those of n samples, each repetition gets one whose client has gone.
        """
        digest = hashlib.blake2b(body, digest_size=16).digest()
        calls = [*(self.answers.get(digest) or ()), *self.asked.get(digest, ())]
        lost = [one for one in reversed(calls) if one.repeated(marked=marked)]
        known = min(lost, key=lambda one: (one.delivered, not one.gone()), default=None)
        if known is None:
            known = Answer(asyncio.ensure_future(self._create(options)), gone)
            self.asked.setdefault(digest, []).append(known)
            known.task.add_done_callback(lambda task: self._keep(digest, known))
        known.gone, known.delivered = gone, False
        return known

    def _keep(self, digest: bytes, answer: Answer) -> None:
        """Keep the answer of a call for one that repeats it; a call that failed leaves nothing."""
        under_way = self.asked[digest]
        under_way.remove(answer)
        if not under_way:
            del self.asked[digest]
        if not answer.task.cancelled() and answer.task.exception() is None:
            answer.num_bytes = BYTES_PER_TOKEN * answer.task.result().usage["total_tokens"]
            kept = [*(self.answers.get(digest) or ()), answer]
            self.answers.put(digest, kept, sum(one.num_bytes for one in kept))

    async def _create(self, options: Mapping[str, Any]) -> ChatCompletion:
        completion = await self.client.chat.create(**options)
        read = self.client.shown(completion.prompt_token_ids[-TAIL:])
        self.answer = heard(completion.choices[0].message.content, read)
        return completion

    async def offered(self, record: Record) -> None:
        assert self.offers is not None
        self.record, self.ended = record, asyncio.get_running_loop().create_future()
        with self.client.waiting():
            taken = self.offers.add(self)
            while not taken.done():
                await asyncio.wait({taken}, timeout=HEARTBEAT_S)
                self.client.note_progress()
        if failed := await self.ended:
            raise TaskError(f"the outside program reported a failed episode, see its log: {failed}")

    def remember(self, response: str, conversation: list[dict[str, Any]]) -> None:
        """Keep the conversation up to an answer, for a call that goes on from it by name."""
        size = sum(len(str(one["content"])) + len(str(one.get("tool_calls", ""))) for one in conversation)
        self.conversations.put(response, conversation, size)

    def end(self) -> None:
        self.over, self.full = True, self.client.full
        for one in chain.from_iterable(self.asked.values()):
            one.task.cancel()


def same_key(given: str, key: str) -> bool:
    return secrets.compare_digest(given.encode(errors="surrogateescape"), key.encode())


class Offers:
    """Sessions that wait for a program outside, the oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Session, asyncio.Future[None]]] = {}
        self._come = asyncio.Event()

    def add(self, session: Session) -> asyncio.Future[None]:
        """Done once it is taken."""
        taken = asyncio.get_running_loop().create_future()
        self._waiting[session.id] = session, taken
        self._come.set()
        return taken

    def remove(self, session: Session) -> None:
        self._waiting.pop(session.id, None)

    async def take(self, gone: Callable[[], bool]) -> Session:
        while not self._waiting:
            self._come.clear()
            await self._come.wait()
        if gone():  # its program, that is
            raise TimeoutError
        session, taken = self._waiting.pop(next(iter(self._waiting)))
        taken.set_result(None)
        return session


class Sessions:
    """The sessions of an actor by their keys.

    Args:
        admin_key: opens every session by its name, and those that wait for programs outside; None: no key does.
    """

    def __init__(self, admin_key: str | None = None) -> None:
        self._admin_key, self._offers = admin_key, Offers()
        self._named: dict[str, Session] = {}
        self._open: dict[str, Session] = {}
        self._ended: dict[str, None] = {}

    def begin(self, client: Client, base_url: str) -> Session:
        key = f"sk-{secrets.token_urlsafe(24)}"
        session = Session(base_url, key, client=client, id=secrets.token_hex(8), offers=self._offers)
        self._open[key] = self._named[session.id] = session
        return session

    async def take(self, wait_s: float, gone: Callable[[], bool]) -> Session:
        """The next session for a program outside. Raises TimeoutError: none came, or the caller is gone."""
        async with asyncio.timeout(wait_s):
            return await self._offers.take(gone)

    def end(self, session: Session) -> None:
        self._open.pop(session.api_key, None)
        self._named.pop(session.id, None)
        self._offers.remove(session)
        for name in (session.api_key, session.id):
            self._ended[name] = None
            if len(self._ended) > MAX_ENDED_KEYS:
                del self._ended[next(iter(self._ended))]
        session.end()

    def get(self, key: str) -> Session | None:
        return self._open.get(key)

    def is_over(self, key: str) -> bool:
        return key in self._ended

    def is_admin(self, key: str) -> bool:
        return self._admin_key is not None and same_key(key, self._admin_key)

    def named(self, name: str) -> Session | None:
        return self._named.get(name)
