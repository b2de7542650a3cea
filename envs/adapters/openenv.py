"""`env.name=openenv:URL`: an environment behind a server of OpenEnv (0.10), with one WebSocket for each episode.

Nothing of the package is imported. `GET /schema` names the fields of an action and of an observation; then

    {"type": "reset", "data": {"seed": 3}}    {"type": "step", "data": ACTION}
    {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}
    {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "..."}}

Observations are messages of the user, answers are actions; each turn has the reward of its own step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from envs.adapters.gymnasium_text import NUM_TEST, NUM_TRAIN, SeededTask
from envs.data.shapes import json_or_text
from envs.reward_values import number
from envs.thoughts import spoken
from streamrl.environment import ChatMessage, GenerationClient, Record, Step
from streamrl.errors import TaskError

PREFIX = "openenv:"
FULL_WAIT_S = 0.2
"""Wait between two attempts at a server all of whose sessions are taken."""
OF_EVERY_MODEL = {"metadata", "done", "reward"}
"""Fields that the schema of every action or observation has."""


class OpenEnvTask(SeededTask):
    """Task whose records are seeds, each of which the server turns into an episode.

    Args:
        url: of the server, as http://localhost:8000.
        action: the field of an action that the model's answer is; "json" where the model writes the whole action. None
            is the only field that there is.
        observation: the field that is the user's message. None is the only one, else the observation as JSON.
        reset: further arguments of `reset`, as the name of a level.
        num_train: seeds of the training split.
        num_test: seeds of the test split.
    """

    def __init__(
        self, url: str, /, *, action: str | None = None, observation: str | None = None,
        reset: Mapping[str, Any] | None = None, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise TaskError(f"env.name={PREFIX}{url} names no server: write {PREFIX}http://HOST:PORT")
        super().__init__(PREFIX + url, lambda: OpenEnv(self), num_train, num_test)
        self.url, self.reset = url.rstrip("/"), dict(reset or {})
        self._action, self._observation = action, observation
        self._schemas: dict[str, Any] | None = None

    async def schemas(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """Properties of the schemas of action and observation, by field."""
        if self._schemas is None:
            async with http.get(f"{self.url}/schema") as response:
                found = await response.json() if response.status == 200 else {}
            if not isinstance(found, dict) or not {"action", "observation"} <= set(found):
                raise TaskError(f"{self.url}/schema has status {response.status}, see that it is a server of OpenEnv")
            self._schemas = {
                kind: {name: one for name, one in found[kind].get("properties", {}).items()
                       if name not in OF_EVERY_MODEL}
                for kind in ("action", "observation")
            }
        return self._schemas

    def action_of(self, answer: str) -> Any:
        """The action that an answer is; what is none is sent as it is, and refused by the server."""
        assert self._schemas is not None
        fields = self._schemas["action"]
        name = self._action or (next(iter(fields)) if len(fields) == 1 else None)
        if name == "json":
            return json_or_text(answer)
        if name not in fields:
            raise TaskError(
                f"env.options.action={self._action} must name the field that the model's answer is, one of "
                f"{', '.join(fields) or 'none'}, or be json, where the model writes the whole action"
            )
        kinds = {one.get("type") for one in (fields[name], *fields[name].get("anyOf", ()))}
        return {name: answer if "string" in kinds else json_or_text(answer)}

    def message_of(self, observation: Mapping[str, Any]) -> ChatMessage:
        """The user's message that shows an observation."""
        shown = {name: value for name, value in observation.items() if name not in OF_EVERY_MODEL}
        name = self._observation or (next(iter(shown)) if len(shown) == 1 else None)
        if name is not None and name not in shown:
            known = ", ".join(shown)
            raise TaskError(f"env.options.observation={name} is no field of an observation: name one of {known}")
        told = shown if name is None else shown[name]
        return ChatMessage("user", told if isinstance(told, str) else json.dumps(told, ensure_ascii=False))


class OpenEnv:
    """Environment of one episode, which the server plays."""

    def __init__(self, task: OpenEnvTask) -> None:
        self._task = task

    async def reset(self, record: Record) -> list[ChatMessage]:
        """The first message, for which a tiny model is made; an episode of its own begins with it."""
        async with self._begun(record, lambda: asyncio.sleep(FULL_WAIT_S)) as (_, found):
            return [self._task.message_of(found["observation"])]

    async def rollout(self, record: Record, client: GenerationClient) -> Step:
        async def wait() -> None:
            with client.waiting():
                await asyncio.sleep(FULL_WAIT_S)
            client.note_progress()

        async with self._begun(record, wait) as (socket, found):
            messages = [self._task.message_of(found["observation"])]
            while not found["done"] and client.num_turns_left:
                said = (await client.generate(messages)).text
                messages.append(ChatMessage("assistant", said))
                try:
                    answer = spoken(said)
                    action = self._task.action_of(answer if answer == said else answer.strip())
                    found = await _asked(socket, "step", action)
                except _InvalidActionError as error:
                    messages.append(ChatMessage("user", f"This is no action: {error}"))
                    continue
                messages.append(self._task.message_of(found["observation"]))
                client.reward(number(found["reward"] or 0.0, f"{self._task.name}, the reward of a step,"))
            return Step(0.0, truncated=not found["done"])

    @contextlib.asynccontextmanager
    async def _begun(
        self, record: Record, wait: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[tuple[aiohttp.ClientWebSocketResponse, dict[str, Any]]]:
        """A session of the server and its first observation; `wait` is called while all sessions are taken."""
        task, only_there = self._task, aiohttp.TraceConfig()
        only_there.on_request_redirect.append(_refuse_redirect)
        async with aiohttp.ClientSession(trace_configs=[only_there]) as http:
            while True:
                try:
                    await task.schemas(http)
                    socket = await http.ws_connect(f"{task.url}/ws", max_msg_size=0)
                except (aiohttp.ClientError, OSError) as error:
                    raise TaskError(f"no server of OpenEnv answers at {task.url}, start it there: {error}") from error
                async with socket:
                    found = None
                    with contextlib.suppress(_ServerFullError):
                        found = await _asked(socket, "reset", {**task.reset, "seed": record["seed"]})
                    if found is not None:
                        yield socket, found
                        return
                await wait()


async def _refuse_redirect(_: aiohttp.ClientSession, __: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    """The actor allowed one server and no other."""
    raise TaskError(f"{redirect.url} redirects to another address: name the server that plays in env.name itself")


class _InvalidActionError(Exception):
    """The server read no action in what it was sent."""


class _ServerFullError(Exception):
    """Every session of the server is taken."""


async def _asked(socket: aiohttp.ClientWebSocketResponse, kind: str, data: Any) -> dict[str, Any]:
    """The observation that follows a reset or a step. Raises TaskError if the server failed."""
    ended = f"the server of OpenEnv ended the episode at {kind}, see its own log"
    try:
        await socket.send_json({"type": kind, "data": data})
        message = await socket.receive()
    except (aiohttp.ClientError, OSError) as error:
        raise TaskError(f"{ended}: {error}") from error
    if message.type != aiohttp.WSMsgType.TEXT:
        raise TaskError(ended)
    answer = message.json()
    if answer.get("type") == "observation" and {"observation", "reward", "done"} <= set(answer.get("data", ())):
        return answer["data"]
    told = answer.get("data") if answer.get("type") == "error" else {"message": f"an answer {message.data[:200]}"}
    code, why = told.get("code"), str(told.get("errors") or told.get("message"))[:300]
    if code == "CAPACITY_REACHED":
        raise _ServerFullError(why)
    if kind == "step" and code == "VALIDATION_ERROR":
        raise _InvalidActionError(why)
    raise TaskError(f"the server of OpenEnv refused {kind}, see its own log: {code} {why}")
