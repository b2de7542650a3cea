"""Anthropic's messages as JSON: content in blocks, tools with `input_schema`, events with names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from actors.endpoint.fields import MessagesFields
from actors.endpoint.form import SAMPLING, Body, Form, event, picked, text_of
from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion, before_calls

NAMES = {"max_tokens": "max_tokens", "stop_sequences": "stop", "train": "train", **{name: name for name in SAMPLING}}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def options(body: Body, session: Session) -> dict[str, Any]:
    """Also of a request that only counts tokens."""
    choice = (body.get("tool_choice") or {"type": "auto"})["type"]
    found = {**picked(body, NAMES), "tool_choice": choice}
    return {**found, "messages": _messages(body), "tools": [_tool(one) for one in body.get("tools") or ()]}


def _tool(one: Body) -> dict[str, Any]:
    shape = {"name": one["name"], "description": one.get("description") or "", "parameters": one["input_schema"]}
    return {"type": "function", "function": shape}


def _messages(body: Body) -> list[dict[str, Any]]:
    """Messages in the form of chat: every tool's result is one of its own, before what else the user says."""
    system = text_of(body.get("system") or "")
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for one in body["messages"]:
        content = one["content"]
        texts, calls, results = [], [], []
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            match block.get("type"):
                case "text":
                    texts.append(block["text"])
                case "tool_use":
                    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                    calls.append({"id": block["id"], "function": function})
                case "tool_result":
                    results.append({
                        "role": "tool", "content": text_of(block.get("content") or ""),
                        "tool_call_id": block.get("tool_use_id"),
                    })
        found += results
        if texts or calls or not results:
            found.append({"role": one["role"], "content": "".join(texts) or None, "tool_calls": calls})
    return found


def _answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
    (choice,) = completion.choices
    calls, text, stop = choice.message.tool_calls or [], choice.message.content, None
    if calls:
        text = before_calls(text)
    elif choice.finish_reason == "stop":
        asked = body.get("stop_sequences") or ()
        stops = [asked] if isinstance(asked, str) else asked
        stop = next((one for one in stops if one and one in text), None)
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text.strip() or not calls else []
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.function.name, "input": json.loads(call.function.arguments)}
        for call in calls
    ]
    usage = completion.usage
    return {
        "id": completion.id, "type": "message", "role": "assistant", "model": body.get("model") or "policy",
        "content": blocks, "stop_reason": REASONS[choice.finish_reason] if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def _events(whole: Mapping[str, Any], body: Body) -> Iterator[bytes]:
    def say(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, named=True)

    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**whole["usage"], "output_tokens": 0}}
    yield say("message_start", message={**whole, **begun})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield say("content_block_start", index=index, content_block=start)
        yield say("content_block_delta", index=index, delta=delta)
        yield say("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield say("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield say("message_stop")


MESSAGES = Form(MessagesFields, options, _answer, _events)
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def error_json(status: int, code: str, message: str) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
