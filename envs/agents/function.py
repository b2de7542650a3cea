"""An agent that is an `async` function in the actor's process: `async def run(client, record)`.

It takes what its parameters name: `client`, an `openai.AsyncOpenAI` of its session; `base_url` and `api_key`, for other
clients; and the record, under any other name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from envs.adapters.awaiting import is_async
from envs.task_file import run_file
from streamrl.environment import AgentSession, Record
from streamrl.errors import ConfigError, TaskError
from streamrl.extension import import_attribute

GIVEN = ("client", "base_url", "api_key")


def function_agent(name: str) -> Callable[[Record, AgentSession], Awaitable[Any]]:
    """The agent that `agent.py:run` or `package.module:run` names. Raises TaskError if there is none."""
    function = _found(name)
    if not callable(function) or not is_async(function):
        raise TaskError(f"env.agent={name} is not an async function: write `async def run(client, record)`")
    known = list(inspect.signature(function).parameters)
    others = [one for one in known if one not in GIVEN]
    if len(others) != 1:
        raise TaskError(
            f"env.agent={name} must take the record and any of {', '.join(GIVEN)}, as run(client, record); it takes "
            f"({', '.join(known)})"
        )
    clients = _Clients() if "client" in known else None

    async def play(record: Record, session: AgentSession) -> Any:
        given = {"base_url": session.base_url, "api_key": session.api_key, others[0]: record}
        if clients is not None:
            given["client"] = clients.of(session)
        return await function(**{key: value for key, value in given.items() if key in known})

    return play


def _found(name: str) -> Any:
    """The attribute of a file, or of a module on the import path."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        try:
            return import_attribute(name, setting="env.agent")
        except ConfigError as error:
            raise TaskError(str(error)) from error
    module, file = run_file(place, setting="env.agent")
    if not hasattr(module, attribute):
        raise TaskError(f"env.agent={name}: {file.name} has no {attribute!r}, name one of its functions")
    return getattr(module, attribute)


class _Clients:
    """Clients of the package openai for sessions, over common connections: to make one takes long."""

    def __init__(self) -> None:
        try:
            import openai
        except ImportError as error:
            raise TaskError(
                "the function of env.agent takes a client of the package openai, which is not installed: pip install "
                "'streamrl[agents]', or take base_url and api_key"
            ) from error
        self._make = openai.AsyncOpenAI
        self._first: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def of(self, session: AgentSession) -> Any:
        loop = asyncio.get_running_loop()
        if self._first is None or self._loop is not loop:  # connections belong to a loop
            self._first, self._loop = self._make(base_url=session.base_url, api_key=session.api_key), loop
        return self._first.with_options(base_url=session.base_url, api_key=session.api_key)
