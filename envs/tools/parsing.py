"""Find the calls in what a model said. Families of models write them in different ways.

    tags     <tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>     Hermes, Qwen
    json     {"name": "calculator", "parameters": {"expression": "3+4"}}                           Llama 3
             <function=calculator>{"expression": "3+4"}</function>
    fence    the same object in a fence of json, or a program in a fence of python
    angle    <3+4>, the one argument of the first tool                                             tiny models

Where nothing looks like a call, the text is the final answer. What looks like a call and cannot be read becomes a
`BadCall`, whose reason goes to the model as an observation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.tools.tool import Tool, required

_TAG = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)(</function>|$)", re.DOTALL)
_FENCE = re.compile(r"```(json|python|py)[ \t]*\n(.*?)(```|$)", re.DOTALL)
_ANGLE = re.compile(r"<([^<>]*)>")
_THINKING_ENDS = "</think>"
FORM = 'write {"name": ..., "arguments": {...}}'


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it; whether there is such a tool is not known yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """Something that was meant as a call; `problem` is what the model reads."""

    problem: str


Calls = list[ToolCall | BadCall]
Parser = Callable[[str, Sequence[Tool]], Calls]


def parse_tags(text: str, tools: Sequence[Tool]) -> Calls:
    """Every <tool_call>; one that the end of the text cuts off is complete if its JSON is."""
    return [_from_json(body) for body, _ in _TAG.findall(text)]


def parse_json(text: str, tools: Sequence[Tool]) -> Calls:
    """A text that is one JSON object with a name, or several separated by semicolons; or <function=name>."""
    functions = _FUNCTION.findall(text)
    if functions:
        return [_from_arguments(name, body) for name, body, _ in functions]
    text = text.replace("<|python_tag|>", "").strip()
    if not (text.startswith("{") and '"name"' in text):
        return []
    return [_from_json(part) for part in _objects(text)]


def parse_fence(text: str, tools: Sequence[Tool]) -> Calls:
    """Fences of json with a name, and fences of python where there is a tool of that name."""
    calls: Calls = []
    has_python = any(tool.name == "python" for tool in tools)
    for language, body, _ in _FENCE.findall(text):
        if language != "json" and has_python:
            calls.append(ToolCall("python", {"code": body}))
        elif language == "json" and '"name"' in body:
            calls.append(_from_json(body))
    return calls


def parse_angle(text: str, tools: Sequence[Tool]) -> Calls:
    """<text> calls the first tool with its one required argument."""
    tool = tools[0]
    names = required(tool)
    if len(names) != 1:
        return [BadCall(f"{tool.name} takes {len(names)} arguments, and <...> holds one.")] if "<" in text else []
    return [ToolCall(tool.name, {names[0]: body}) for body in _ANGLE.findall(text)]


def parse_auto(text: str, tools: Sequence[Tool]) -> Calls:
    """The first of tags, json and fence that finds a call."""
    return parse_tags(text, tools) or parse_json(text, tools) or parse_fence(text, tools)


PARSERS: dict[str, Parser] = {
    "auto": parse_auto, "tags": parse_tags, "json": parse_json, "fence": parse_fence, "angle": parse_angle,
}  # fmt: skip


def spoken(text: str) -> str:
    """The text after the model's thinking: what it only thinks of calling is not called."""
    return text.rpartition(_THINKING_ENDS)[2]


def _objects(text: str) -> list[str]:
    """Consecutive JSON objects, with semicolons between them; a part that is no JSON is one piece to the end."""
    parts, decoder = [], json.JSONDecoder()
    while text:
        try:
            end = decoder.raw_decode(text)[1]
        except ValueError:
            return [*parts, text]
        parts.append(text[:end])
        rest = text[end:].lstrip("; \n")
        if not rest.startswith("{"):
            return parts
        text = rest
    return parts


def _from_json(body: str) -> ToolCall | BadCall:
    try:
        call = json.loads(body)
    except ValueError as error:
        return BadCall(f"the call is not JSON ({error}): {FORM}.")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return BadCall(f"the call has no name: {FORM}.")
    arguments = next((call[key] for key in ("arguments", "parameters") if key in call), {})
    return _from_arguments(call["name"], arguments)


def _from_arguments(name: str, arguments: Any) -> ToolCall | BadCall:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return BadCall(f"the arguments of {name} are not JSON ({error}).")
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {name} are {arguments!r:.60}: give an object with their names.")
    return ToolCall(name, arguments)
