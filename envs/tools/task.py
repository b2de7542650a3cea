"""`env.tools` puts tools around a task: its episodes get more turns, its reward scores the final answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from envs.tools.calculator import Calculator
from envs.tools.environment import ToolRules, tool_env
from envs.tools.parsing import PARSERS
from envs.tools.python import PythonTool
from envs.tools.search import SearchTool
from envs.tools.tool import Tool, schema
from streamrl.config.schema import EnvConfig, ToolUseConfig
from streamrl.environment import Env, Record, Task
from streamrl.errors import TaskError
from streamrl.extension import resolve

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


class ToolTask:
    """A task whose episodes may call tools.

    Args:
        base: the task itself; its `target`, `stop` and `system_prompt` are taken over.
        tools: distinct names.
        rules: of its episodes.
        tool_prompt: what a chat template that shows no tools says of them in the system message.
    """

    def __init__(self, base: Task, tools: Sequence[Tool], rules: ToolRules, tool_prompt: str) -> None:
        self.base, self.name = base, base.name
        self.tool_prompt = tool_prompt
        self._tools, self._rules = tools, rules
        for optional in ("target", "stop", "system_prompt", "label", "set_up", "tear_down"):
            if hasattr(base, optional):
                setattr(self, optional, getattr(base, optional))

    def num_records(self, split: str) -> int:
        return self.base.num_records(split)

    def record(self, split: str, index: int) -> Record:
        return self.base.record(split, index)

    def env(self) -> Env:
        return tool_env(self.base.env(), self._tools, self._rules)


def with_tools(task: Task, env: EnvConfig) -> ToolTask:
    """The task with the tools that `env.tools` names. Raises TaskError or ConfigError: no such tool, or a bad one."""
    use = env.tool_use
    tools = [_tool(name, use) for name in env.tools]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        named = ", ".join(names)
        raise TaskError(f"env.tools={env.tools} gives one name to several tools ({named}): give each tool once.")
    rules = ToolRules(
        resolve(use.parser, PARSERS, setting="env.tool_use.parser"), max_turns=env.max_turns, max_calls=use.max_calls,
        max_output_chars=use.max_output_chars, describe=use.describe, role=use.role.value,
    )
    return ToolTask(task, tools, rules, describe(tools, use.parser))


def describe(tools: Sequence[Tool], parser: str) -> str:
    """The system message's description of the tools: each as JSON, and how a call is written."""
    lines = [json.dumps(schema(tool)["function"], ensure_ascii=False) for tool in tools]
    form = FORMS.get(parser, FORMS["tags"])
    return "\n".join((
        "You may call these tools:", *lines, f"To call one, write {form}.",
        "You will read its output, and may call again. When you know the final answer, write it without a call.",
    ))


def _tool(name: str, settings: ToolUseConfig) -> Tool:
    factory = resolve(name, TOOLS, setting="env.tools")
    tool = factory(settings) if name in TOOLS else factory()
    if not isinstance(tool, Tool) or not isinstance(tool.parameters, Mapping):
        raise TaskError(
            f"env.tools: {name} is no tool: give it name, description, parameters (a JSON schema of its arguments) "
            "and call(arguments)."
        )
    return tool
