"""`env.tools` puts tools around a task: its episodes get more turns, its reward scores the final answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from envs.sandbox import Limits, SandboxPool
from envs.tools.calculator import Calculator
from envs.tools.environment import ToolRules, tool_env
from envs.tools.parsing import PARSERS
from envs.tools.search import SearchTool
from envs.tools.tool import Tool, schema
from streamrl.config.schema import EnvConfig, Sandbox, ToolUseConfig
from streamrl.environment import Record, Task
from streamrl.errors import TaskError
from streamrl.errors import describe as told
from streamrl.extension import resolve_function

LEVELS = {Sandbox.auto: "auto", Sandbox.limited: "1", Sandbox.isolated: "2"}


class PythonTool:
    """Each call is a program of its own in a fresh sandbox; nothing is kept from one call to the next."""

    name = "python"
    description = "Run a Python program and read what it prints. Nothing is kept from one call to the next."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the whole program; print what you want to read"}},
        "required": ["code"],
    }

    def __init__(self, settings: ToolUseConfig) -> None:
        self._settings = settings
        self._pool: SandboxPool | None = None
        self._lock = threading.Lock()

    def call(self, arguments: Mapping[str, Any]) -> str:
        limit_s = self._settings.timeout_s
        outcome = self._sandboxes().run(arguments["code"], total_s=limit_s)[0]
        if outcome.status == "ok":
            return outcome.stdout or "(no output; print what you want to read)"
        if outcome.status == "timeout":
            return f"{outcome.stdout}\nError: the program ran for more than {limit_s:g} s.".lstrip()
        what = outcome.stderr.strip() or f"the program ended with {outcome.status}"
        return f"{outcome.stdout}\nError: {what}".lstrip()

    def _sandboxes(self) -> SandboxPool:
        """Made at the first call: the learner describes the tool and never runs a program."""
        with self._lock:
            if self._pool is None:
                self._pool = SandboxPool(
                    LEVELS[self._settings.sandbox], limits=Limits(timeout_s=self._settings.timeout_s)
                )
            return self._pool


TOOLS: dict[str, Callable[[ToolUseConfig], Tool]] = {
    "calculator": lambda _: Calculator(),
    "python": PythonTool,
    "search": SearchTool,
}
FORMS = {
    "tags": '<tool_call>{"name": <name>, "arguments": <object of arguments>}</tool_call>',
    "json": '{"name": <name>, "parameters": <object of arguments>}',
    "fence": 'a fence of json that holds {"name": <name>, "arguments": <object of arguments>}',
    "angle": "<argument>, for the first tool",
}
"""How the prompt describes the form of a call; where every form is accepted, it describes the first."""
TAKEN_OVER = ("target", "stop", "system_prompt", "label", "set_up", "tear_down")
"""Attributes of the task itself that a task with tools passes on; not its turns, which know no tools."""


class WrappedTask:
    """A task that plays the records of `base` in environments of its own, as with tools or by an agent.

    Args:
        make_env: a fresh environment for each episode.
        taken_over: attributes of the base that it has if the base does.
    """

    tool_prompt = ""
    """The system message describes the tools where the chat template does not show them."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Their schemas."""
    read_calls: Callable[[str], Sequence[Any]] | None = None
    """Finds the calls in a model's text."""

    def __init__(self, base: Task, make_env: Callable[[], Any], taken_over: Iterable[str]) -> None:
        self.base, self.name, self.env = base, base.name, make_env
        for optional in taken_over:
            if hasattr(base, optional):
                setattr(self, optional, getattr(base, optional))

    def num_records(self, split: str) -> int:
        return self.base.num_records(split)

    def record(self, split: str, index: int) -> Record:
        return self.base.record(split, index)


def with_tools(task: Task, env: EnvConfig) -> WrappedTask:
    """The task with the tools that `env.tools` names. Raises TaskError or ConfigError: no such tool, or a bad one."""
    use = env.tool_use
    tools = [_tool(name, use) for name in env.tools]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        named = ", ".join(names)
        raise TaskError(f"env.tools={env.tools} gives one name to several tools ({named}): give each tool once.")
    rules = ToolRules(
        resolve_function(use.parser, PARSERS, setting="env.tool_use.parser"), max_turns=env.max_turns,
        max_calls=use.max_calls, max_output_chars=use.max_output_chars, describe=use.describe, role=use.role.value,
        call_reward=use.call_reward, error_penalty=use.error_penalty,
    )
    found = WrappedTask(task, lambda: tool_env(task.env(), tools, rules), TAKEN_OVER)
    found.tool_prompt = describe(tools, use.parser)
    found.tools, found.read_calls = tuple(map(schema, tools)), lambda text: rules.parse(text, tools)
    return found


def describe(tools: Sequence[Tool], parser: str) -> str:
    """The system message's description of the tools: each as JSON, and how a call is written."""
    lines = [json.dumps(schema(tool)["function"], ensure_ascii=False) for tool in tools]
    form = FORMS.get(parser, FORMS["tags"])
    return "\n".join((
        "You may call these tools:", *lines, f"To call one, write {form}.",
        "You will read its output, and may call again. When you know the final answer, write it without a call.",
    ))


def _tool(name: str, settings: ToolUseConfig) -> Tool:
    factory = resolve_function(name, TOOLS, setting="env.tools")
    try:
        tool = factory(settings) if name in TOOLS else factory()
    except (Exception, SystemExit) as error:
        if name in TOOLS:
            raise
        raise TaskError(f"env.tools: {name} must be made without arguments, see its code: {told(error)}") from error
    if not isinstance(tool, Tool) or not isinstance(tool.parameters, Mapping):
        raise TaskError(
            f"env.tools: {name} is not a tool: give it name, description, parameters (a JSON schema of its arguments) "
            "and call(arguments)."
        )
    return tool
