"""`env.agent` and `env.agent_command`: an agent plays the records of any task, through a session of its own.

What the agent says of its episode is the reward; where it says nothing, the task scores the model's last answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.adapters.forms import own_names
from envs.async_compat import is_async
from envs.data.shapes import RecordShape
from envs.reward_values import as_step
from envs.sandbox.isolation import watched
from envs.task_file import run_file
from envs.tools.task import WrappedTask
from streamrl.config.addresses import environment_without_keys
from streamrl.config.schema import EnvConfig
from streamrl.environment import AgentSession, ChatMessage, DrivesGeneration, Env, GenerationClient, Record, Step, Task
from streamrl.errors import ConfigError, EpisodeFullError, TaskError, install_extra
from streamrl.extension import did_you_mean, import_attribute

TAIL_BYTES = 16 << 10
"""The program's last line must be shorter."""
END_S = 10.0
"""For everything that the program started to be gone."""


def command_agent(command: str) -> Callable[[Record, AgentSession], Awaitable[Any]]:
    """The agent that a command line starts. Raises TaskError for a line that is none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise TaskError(f"env.agent_command={command}: {error}, quote its words as in a shell") from error
    if not words:
        raise TaskError("env.agent_command is empty: give a program and its arguments, such as 'python agent.py'")

    async def play(record: Record, session: AgentSession) -> Any:
        with tempfile.TemporaryDirectory(prefix="streamrl-agent-") as folder:
            return _reward(await _run(words, record, session, Path(folder)))

    return play


async def _run(words: list[str], record: Record, session: AgentSession, folder: Path) -> str:
    """The last line that the program wrote. Raises TaskError if it cannot be started or fails."""
    if shutil.which(words[0]) is None:
        raise TaskError(f"env.agent_command cannot be started: no program {words[0]}. Install it, or give its path.")
    (folder / "record.json").write_text(json.dumps(record))
    variables = {
        "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": session.api_key,
        "STREAMRL_RECORD": str(folder / "record.json"),
    }
    process = await asyncio.create_subprocess_exec(
        *watched(words, TAIL_BYTES), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=environment_without_keys() | variables, start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        answer = await process.stdout.read()
    finally:
        process.stdin.close()  # ends the program, and all that it started
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    try:
        done = json.loads(answer)
    except ValueError as error:
        raise TaskError(
            "env.agent_command and its watcher were killed: find out by what, for example a memory limit"
        ) from error
    if code := done["status"]:
        raise TaskError(f"env.agent_command ended with status {code}, see its last line: {_last_line(done['err'])}")
    return _last_line(done["out"])


def _reward(line: str) -> Any:
    """The number or the dict of parts on a line; None if it is neither."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) else None


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


CLIENTS = {"client": ("openai", "AsyncOpenAI", "/v1"), "anthropic": ("anthropic", "AsyncAnthropic", "")}
"""Parameter -> the package of its client, its class, and what its base URL has at its end."""
GIVEN = (*CLIENTS, "base_url", "api_key")


def function_agent(name: str) -> Callable[[Record, AgentSession], Awaitable[Any]]:
    """The agent that `agent.py:run` or `package.module:run` names. Raises TaskError if there is none.

    It takes what its parameters name: `client`, an `openai.AsyncOpenAI` of its session, or `anthropic`, an
    `anthropic.AsyncAnthropic`; `base_url` and `api_key`, for other clients; and the record, under any other name.
    """
    function = _found(name)
    if not callable(function) or not is_async(function):
        raise TaskError(f"env.agent={name} is not an async function: write `async def run(client, record)`")
    known = list(inspect.signature(function).parameters)
    others = [one for one in known if one not in GIVEN]
    if len(others) != 1:
        raise TaskError(
            f"env.agent={name} must take the record and any of {', '.join(GIVEN)}, as in run(client, record); it takes "
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


Agent = Callable[[Record, AgentSession], Awaitable[Any]]
"""Plays one episode; returns what `as_step` takes, or None."""
TAKEN_OVER = ("target", "target_turns", "stop", "system_prompt", "label", "set_up", "tear_down")
"""Attributes of the task itself that a task with an agent passes on."""


class AgentEnv:
    """One episode of an agent; `judge` is the environment of the task."""

    def __init__(self, judge: Env, agent: Agent, name: str) -> None:
        self._judge, self._agent, self._name = judge, agent, name

    async def reset(self, record: Record) -> Sequence[ChatMessage]:
        """The record's prompt, for which a tiny model is made; the agent itself decides what the model reads."""
        return await _called(self._judge.reset, record)

    async def rollout(self, record: Record, client: GenerationClient) -> Step:
        try:
            async with client.session() as session:
                value = await self._agent(record, session)
        except Exception as error:  # a user's code may raise anything
            if session.full:  # what the agent made of it
                raise EpisodeFullError(session.full) from error
            raise
        value = session.reward if value is None else value
        if value is not None:
            return as_step(value, self._name)
        await self.reset(record)
        answer = session.answer if getattr(self._judge, "hears_thoughts", False) else str(session.answer)
        return replace(await _called(self._judge.step, answer), done=True)

    @property
    def close(self) -> Callable[[], Any]:
        """Call the environment's own, if it has one."""
        return self._judge.close  # type: ignore[attr-defined]


async def _called(method: Callable[[Any], Any], argument: Any) -> Any:
    """A plain method may block: it gets a thread."""
    return await method(argument) if is_async(method) else await asyncio.to_thread(method, argument)


class Unscored:
    """The environment of records that nothing but the agent scores."""

    def __init__(self, shape: RecordShape) -> None:
        self._shape = shape

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        return self._shape.messages(record)

    def step(self, action: str) -> Step:
        raise TaskError(
            "the agent gave no reward, and the records have none: return a number from the function of env.agent, "
            "write one on the last line of env.agent_command, or give reward.type=exact"
        )


async def _outside(record: Record, session: AgentSession) -> None:
    await session.offered(record)


def with_agent(task: Task, env: EnvConfig) -> WrappedTask:
    """The task, played by the agent of the settings. Raises TaskError: no such agent, or episodes with a loop."""
    if isinstance(task.env(), DrivesGeneration):
        raise TaskError(
            f"env.agent plays the episodes of task {task.name}, which has an interaction loop of its own: leave one out"
        )
    if env.agent is not None:
        agent = _outside if env.agent == "outside" else function_agent(env.agent)
    else:
        assert env.agent_command is not None
        agent = command_agent(env.agent_command)
    name = env.agent or env.agent_command
    return WrappedTask(task, lambda: AgentEnv(task.env(), agent, name), TAKEN_OVER)
