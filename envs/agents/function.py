"""An agent that is an `async` function in the actor's process: `async def run(client, record)`.

It takes what its parameters name: `client`, an `openai.AsyncOpenAI` of its session, or `anthropic`, an
`anthropic.AsyncAnthropic`; `base_url` and `api_key`, for other clients; and the record, under any other name.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from envs.adapters.forms import own_names
from envs.async_compat import is_async
from envs.task_file import run_file
from streamrl.environment import AgentSession, Record
from streamrl.errors import ConfigError, TaskError, install_extra
from streamrl.extension import did_you_mean, import_attribute

CLIENTS = {"client": ("openai", "AsyncOpenAI", "/v1"), "anthropic": ("anthropic", "AsyncAnthropic", "")}
"""Parameter -> the package of its client, its class, and what its base URL has at its end."""
GIVEN = (*CLIENTS, "base_url", "api_key")


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
    clients = {one: _clients(one) for one in CLIENTS if one in known}

    async def play(record: Record, session: AgentSession) -> Any:
        given = {"base_url": session.base_url, "api_key": session.api_key, others[0]: record}
        given |= {parameter: of.of(session) for parameter, of in clients.items()}
        return await function(**{key: value for key, value in given.items() if key in known})

    return play


def _found(name: str) -> Any:
    """The attribute of a file, or of a module on the import path."""
    place, _, attribute = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    if not place.endswith(".py"):
        try:
            return import_attribute(name, setting="env.agent")
        except ConfigError as error:
            raise TaskError(str(error)) from error
    module, file = run_file(place, setting="env.agent")
    if not hasattr(module, attribute):
        known = [key for key, value in own_names(module).items() if callable(value) and is_async(value)]
        hint = did_you_mean(attribute, known) or f" It has {', '.join(known) or 'none'}."
        raise TaskError(f"env.agent={name} names no function of {file.name}: write env.agent={place}:run.{hint}")
    return getattr(module, attribute)


@functools.cache
def _clients(parameter: str) -> _Clients:
    return _Clients(parameter)


class _Clients:
    """Clients of one package for all sessions of the process, over common connections: to make one takes long.

    They outlive their agents. A connection that is garbage collected is closed behind its event loop's back, and the
    next socket with its descriptor, the endpoint's own too, would never be told that something came.
    """

    def __init__(self, parameter: str) -> None:
        package, name, self._end = CLIENTS[parameter]
        try:
            module = importlib.import_module(package)
            self._make, self._http = getattr(module, name), module.DefaultAsyncHttpxClient
        except ImportError as error:
            raise TaskError(
                f"the function of env.agent takes {parameter}, of the package {package}, which is not installed; "
                f"install it with {install_extra('agents')}, or take base_url and api_key"
            ) from error
        self._first: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def of(self, session: AgentSession) -> Any:
        loop, url = asyncio.get_running_loop(), session.base_url.removesuffix("/v1") + self._end
        if self._first is None or self._loop is not loop:  # connections belong to a loop
            http = self._http(trust_env=url.startswith("https://"))  # no proxy stands before the actor itself
            self._first, self._loop = self._make(base_url=url, api_key=session.api_key, http_client=http), loop
        return self._first.with_options(base_url=url, api_key=session.api_key)
