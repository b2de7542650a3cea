"""OpenAI's responses as JSON: items instead of messages, functions without a wrapper, events with names.

A session keeps the conversations of its answers, so that `previous_response_id` goes on with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actors.endpoint.fields import ResponsesFields
from actors.endpoint.form import SAMPLING, Body, Form, event, picked, text_of
from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion, before_calls
from streamrl.errors import TaskError

NAMES = {
    "max_output_tokens": "max_tokens", "tool_choice": "tool_choice", "train": "train",
    **{name: name for name in SAMPLING},
}
TEXTS = ("input_text", "output_text", "text")


def _options(body: Body, session: Session) -> dict[str, Any]:
    found = picked(body, NAMES)
    form = ((body.get("text") or {}).get("format") or {"type": "text"}).get("type")
    if form != "text":
        raise TaskError(f"POST /v1/responses does not take text.format={form}: ask for the form in words")
    return {**found, "messages": _with_instructions(body, _conversation(body, session)),
            "tools": [_tool(one) for one in body.get("tools") or ()]}


def _with_instructions(body: Body, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the instructions first; those of an earlier response are not taken over."""
    return [{"role": "system", "content": body["instructions"]}, *messages] if body.get("instructions") else messages


def _tool(one: Body) -> dict[str, Any]:
    shape = {"name": one["name"], "description": one.get("description") or "", "parameters": one.get("parameters")}
    return {"type": "function", "function": shape}


def _conversation(body: Body, session: Session) -> list[dict[str, Any]]:
    """The messages of the request in the form of chat, after those of the response that it goes on from."""
    given, previous = body["input"], body.get("previous_response_id")
    before = [] if previous is None else session.conversations.get(previous)
    if before is None:
        raise TaskError(
            f"previous_response_id={previous!r:.60} names no response that this session still has: give all messages"
        )
    found = list(before)
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    for item in given:
        match item.get("type", "message"):
            case "message":
                found.append({"role": item.get("role"), "content": text_of(item["content"], TEXTS)})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                message = _assistant(found)
                message["tool_calls"] = [
                    *message.get("tool_calls", ()), {"id": item["call_id"], "function": function}
                ]
            case "function_call_output":
                found.append({
                    "role": "tool", "content": text_of(item["output"], TEXTS), "tool_call_id": item.get("call_id"),
                })
    return found


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a call belongs to: what the model said before it, if it did."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    else:
        messages[-1] = dict(messages[-1])  # it may be one of an earlier response, which stays as it was
    return messages[-1]


def _answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
    (choice,) = completion.choices
    calls, text = choice.message.tool_calls or [], choice.message.content
    session.remember(completion.id, [*_conversation(body, session), {
        "role": "assistant", "content": text,
        "tool_calls": [{"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments}}
                       for call in calls],
    }])
    text = before_calls(text) if calls else text
    cut = choice.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if text.strip() or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        output.append({"type": "message", "id": f"message-{completion.id}", "role": "assistant", "status": status,
                       "content": [part]})
    output += [
        {"type": "function_call", "id": f"item-{call.id}", "call_id": call.id, "name": call.function.name,
         "arguments": call.function.arguments, "status": "completed"} for call in calls
    ]
    usage, sampling = completion.usage, session.client.sampling
    return {
        "id": completion.id, "object": "response", "created_at": 0, "status": status, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "model": body.get("model") or "policy",
        "output": output, "parallel_tool_calls": True, "tool_choice": "auto", "tools": body.get("tools") or [],
        "instructions": body.get("instructions"), "previous_response_id": body.get("previous_response_id"),
        "metadata": body.get("metadata") or {}, "temperature": sampling["temperature"], "top_p": sampling["top_p"],
        "max_output_tokens": body.get("max_output_tokens"),
        "usage": {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _events(whole: Mapping[str, Any], body: Body) -> Iterator[bytes]:
    number = -1

    def say(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": f"response.{kind}", "sequence_number": number, **fields}, named=True)

    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield say("created", response=begun)
    yield say("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            (part,) = item["content"]
            yield say("output_item.added", output_index=index, item={**item, "status": "in_progress", "content": []})
            yield say("content_part.added", **at, content_index=0, part={**part, "text": ""})
            yield say("output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
            yield say("output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
            yield say("content_part.done", **at, content_index=0, part=part)
        else:
            yield say("output_item.added", output_index=index, item={**item, "status": "in_progress", "arguments": ""})
            yield say("function_call_arguments.delta", **at, delta=item["arguments"])
            yield say("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        yield say("output_item.done", output_index=index, item=item)
    yield say("incomplete" if whole["status"] == "incomplete" else "completed", response=whole)


RESPONSES = Form(ResponsesFields, _options, _answer, _events)
