"""An episode with tools around an environment: calls are answered here, the final answer goes to the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.async_compat import alike, call, suited
from envs.thoughts import spoken
from envs.tools.parsing import BadCall, Parser, ToolCall
from envs.tools.tool import Tool, ToolError, check_arguments, schema
from streamrl.environment import (
    ChatMessage,
    DrivesGeneration,
    Env,
    HasCutStep,
    HasLastStep,
    HasTools,
    ReadsInputText,
    Record,
    Step,
)
from streamrl.errors import TaskError
from streamrl.extension import did_you_mean

CUT = "\n... ({} more characters)"
NO_CALLS_LEFT = "No calls are left: give the final answer."


@dataclass(frozen=True, slots=True)
class ToolRules:
    """Rules of episodes with tools.

    Args:
        parse: reads the calls of one turn; no calls make it the final answer.
        max_turns: the text of the last turn is the final answer, whatever it holds.
        max_calls: of an episode, failed ones included; a turn that asks for more gets one observation that says so.
        max_output_chars: longer answers of tools are cut.
        describe: show the tools to the model.
        role: of the answers: "tool", or "user" for chat templates that know no tools.
        call_reward, error_penalty: what each call that works earns, and each that fails costs.
        error_text: said in place of every error, to a model that cannot read errors; None is the error itself.
    """

    parse: Parser
    max_turns: int
    max_calls: int = 8
    max_output_chars: int = 2000
    describe: bool = True
    role: str = "tool"
    error_text: str | None = None
    call_reward: float = 0.0
    error_penalty: float = 0.0


class ToolEnv:
    """An episode with tools, whose `env` gets the final answer alone.

    `tools` are the schemas that the chat template shows to the model, those of the environment's own included.
    """

    def __init__(self, env: Env, tools: Sequence[Tool], rules: ToolRules) -> None:
        self.tools: list[Mapping[str, Any]] = []
        self._env, self._tools, self._rules = env, {tool.name: tool for tool in tools}, rules
        self._reset, self._step, *calls = alike(*_functions(env, tools))
        self._calls = dict(zip(self._tools, calls, strict=True))
        self._turn = self._num_calls = self._num_errors = 0
        self._no_calls_left = False
        self.hears_thoughts = True

    async def reset(self, record: Record) -> Sequence[ChatMessage]:
        self._turn = self._num_calls = self._num_errors = 0
        self._no_calls_left = False
        messages = await call(self._reset, record)
        described = [schema(tool) for tool in self._tools.values()] if self._rules.describe else []
        self.tools = [*described, *(self._env.tools if isinstance(self._env, HasTools) else ())]
        return messages

    async def step(self, action: str) -> Step:
        self._turn += 1
        rules = self._rules
        calls = [] if self._no_calls_left else rules.parse(spoken(action), list(self._tools.values()))
        if not calls or self._turn >= rules.max_turns:
            step = await call(self._step, action if getattr(self._env, "hears_thoughts", False) else str(action))
            counts = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
            # An environment of several turns may go on; what its steps say is theirs, the counts come with the last.
            return replace(step, parts={**counts, **step.parts}) if step.done else step
        failed = self._num_errors
        answers = [await self._answer(one) for one in calls[: rules.max_calls - self._num_calls]]
        failed = self._num_errors - failed
        earned = rules.call_reward * (len(answers) - failed) - rules.error_penalty * failed
        if len(answers) < len(calls) or not answers:
            self._no_calls_left = True
            answers.append(ChatMessage(rules.role, rules.error_text or NO_CALLS_LEFT))
        return Step(reward=earned, done=False, score=0.0, messages=answers)

    @property
    def close(self) -> Callable[[], Any]:
        """Call the environment's own, if it has one."""
        return self._env.close  # type: ignore[attr-defined]

    async def _answer(self, asked: ToolCall | BadCall) -> ChatMessage:
        self._num_calls += 1
        try:
            if isinstance(asked, BadCall):
                raise ToolError(asked.problem)
            tool = self._tools.get(asked.name)
            if tool is None:
                hint, names = did_you_mean(asked.name, self._tools), ", ".join(self._tools)
                raise ToolError(f"there is no tool {asked.name!r:.60}.{hint} There are: {names}.")
            check_arguments(tool, asked.arguments)
            text = str(await call(self._calls[asked.name], asked.arguments))
        except Exception as error:  # whatever a tool does, the model reads it and the episode goes on
            self._num_errors += 1
            text = f"Error: {error}" if isinstance(error, ToolError) else f"Error: {type(error).__name__}: {error}"
            text = self._rules.error_text or text
        return ChatMessage(self._rules.role, cut(text, self._rules.max_output_chars), self._sender(asked))

    def _sender(self, asked: ToolCall | BadCall) -> dict[str, str]:
        """Fields that templates ask for in a result: Hermes 2 a name, Mistral an id of nine letters or digits."""
        if self._rules.role != "tool":
            return {}
        name = asked.name if isinstance(asked, ToolCall) and asked.name in self._tools else "unknown"
        return {"name": name, "tool_call_id": f"call{self._num_calls:05d}"}


def tool_env(env: Env, tools: Sequence[Tool], rules: ToolRules) -> ToolEnv:
    """The environment with tools around it, async if a part of it is. Raises TaskError for one that takes no tools."""
    if isinstance(env, DrivesGeneration):
        raise TaskError(
            f"env.tools cannot be put around {type(env).__name__}: it drives the generation and calls tools itself; "
            "leave env.tools out."
        )
    if isinstance(env, HasLastStep | HasCutStep | ReadsInputText):
        raise TaskError(
            f"env.tools cannot be put around {type(env).__name__}: an environment with last_step, cut_step or "
            "set_input_text answers calls itself; leave env.tools out."
        )
    return suited(ToolEnv, *_functions(env, tools))(env, tools, rules)


def _functions(env: Env, tools: Sequence[Tool]) -> list[Callable[[Any], Any]]:
    return [env.reset, env.step, *(tool.call for tool in tools)]


def cut(text: str, max_chars: int) -> str:
    """The beginning of a long text, and how much is missing."""
    return text if len(text) <= max_chars else text[:max_chars] + CUT.format(len(text) - max_chars)
