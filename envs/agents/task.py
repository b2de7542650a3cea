"""`env.agent` and `env.agent_command`: an agent plays the records of any task, through a session of its own.

What the agent says of its episode is the reward; where it says nothing, the task scores the model's last answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from envs.agents.command import command_agent
from envs.agents.function import function_agent
from envs.async_compat import is_async
from envs.data.shapes import RecordShape
from envs.reward_values import as_step
from envs.tools.task import WrappedTask
from streamrl.config.schema import EnvConfig
from streamrl.environment import AgentSession, ChatMessage, DrivesGeneration, Env, GenerationClient, Record, Step, Task
from streamrl.errors import EpisodeFullError, TaskError

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
