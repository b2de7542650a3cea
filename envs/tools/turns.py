"""A turn of the model as a message whose thoughts and calls are fields, for templates that write these themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from envs.thoughts import CLOSED, OPENED, reopened, spoken, spoken_from
from envs.tools.parsing import STARTS, BadCall, Described, ToolCall, parse_written
from streamrl.environment import THOUGHTS, ChatMessage

_THOUGHT = re.compile(f"{OPENED}(.*?)(?:{CLOSED}|$)", re.DOTALL)


def before_calls(text: str) -> str:
    """The text that the model wrote before its first call of a tool."""
    start = spoken_from(text)
    marks = (text.find(mark, start) for mark in STARTS)
    return text[: min((place for place in marks if place >= 0), default=start)]


def split_turns(
    messages: Sequence[ChatMessage], tools: Described, *, keeps_words: bool = True
) -> list[ChatMessage]:
    """The conversation, each turn of the model split into what it thought, said and called.

    What was meant as a call and cannot be read becomes one of "unknown", whose result says so. Words beside a call are
    left out unless the template `keeps_words` in their place.
    """
    found = list(messages)
    for place, one in enumerate(messages):
        if one.role == "assistant":
            ids = [after.fields.get("tool_call_id") for after in _results(messages[place + 1 :])]
            found[place] = _split(one, tools, ids, keeps_words)
    return found


def one_by_one(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The conversation with one call a message, each before its result; as it is where one has no result."""
    found: list[ChatMessage] = []
    left: list[ChatMessage] = []  # the message before each result that is yet to come
    for place, one in enumerate(messages):
        if one.role == "tool":
            found += [*left[:1], one]
            left = left[1:]
            continue
        calls, results = one.fields.get("tool_calls") or (), _results(messages[place + 1 :])
        if len(calls) < 2 or len(results) < len(calls):
            found.append(one)
            continue
        others = {name: value for name, value in one.fields.items() if name not in THOUGHTS}
        left = [replace(one, content="", fields={**others, "tool_calls": [call]}) for call in calls]
        left[0] = replace(one, fields={**one.fields, "tool_calls": [calls[0]]})
    return found


def _results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    return list(takewhile(lambda one: one.role == "tool", messages))


def _split(message: ChatMessage, tools: Described, ids: Sequence[Any], keeps_words: bool) -> ChatMessage:
    text, fields = reopened(message.content), dict(message.fields)
    thought = "\n".join(part.strip("\n") for part in _THOUGHT.findall(text))
    said = spoken(text)
    if ids and not fields.get("tool_calls"):
        calls = parse_written(said, tools)
        fields["tool_calls"] = [
            {
                "id": ids[min(place, len(ids) - 1)],
                "type": "function",
                "function": _function(one),
            }
            for place, one in enumerate(calls)
        ]
        said = before_calls(said) if calls else said
    if thought and not any(fields.get(name) for name in THOUGHTS):
        fields |= dict.fromkeys(THOUGHTS, thought)
    if fields.get("tool_calls") and (thought or not keeps_words):
        said = ""  # templates refuse both beside a call
    return replace(message, content=said, fields={name: one for name, one in fields.items() if one})


def _function(one: ToolCall | BadCall) -> dict[str, Any]:
    if isinstance(one, BadCall):
        return {"name": "unknown", "arguments": {}}
    return {
        "name": one.name,
        "arguments": one.arguments,
    }
