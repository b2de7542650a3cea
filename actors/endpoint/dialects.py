"""The dialects of the endpoint: each translates a request to the options of `Chat.create`, and the answer back.

    chat        OpenAI's chat completions, with the token ids that vLLM adds where `return_token_ids` asks
    responses   OpenAI's responses: items instead of messages, functions without a wrapper, events with names; a session
                keeps the conversations of its answers, so that `previous_response_id` goes on with one
    messages    Anthropic's: content in blocks, tools with `input_schema`, events with names
    tokens      vLLM's `/inference/v1/generate`: ids in, ids out, for clients that render prompts themselves
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import Struct

from actors.endpoint.fields import ChatFields, MessagesFields, ResponsesFields, TokensFields
from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion
from envs.tools.turns import before_calls
from streamrl.errors import TaskError

Body = Mapping[str, Any]
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
SAME = {name: name for name in ("train", "tool_choice", *SAMPLING)}
"""Fields that have in every dialect of messages the name that `Chat.create` gives them."""


@dataclass(frozen=True, slots=True)
class Form:
    """Translation of one API's requests and answers.

    Attributes:
        fields: the table of its requests.
        options: of `Chat.create`; raises TaskError for what is not served.
        answer: the whole answer as JSON.
        events: the whole answer as server-sent events; None: the API does not stream.
    """

    fields: type[Struct]
    options: Callable[[Body, Session], dict[str, Any]]
    answer: Callable[[ChatCompletion, Body, Session], dict[str, Any]]
    events: Callable[[Mapping[str, Any], Body], Iterator[bytes]] | None


def picked(body: Body, names: Mapping[str, str]) -> dict[str, Any]:
    """These fields of a request under their names in `Chat.create`."""
    return {names[name]: value for name, value in body.items() if name in names}


def tools_of(body: Body, schema: str) -> list[dict[str, Any]]:
    """The tools of a request in the form of chat; `schema`: the field of a tool that holds that of its arguments."""
    return [
        {"type": "function", "function": {
            "name": one["name"], "description": one.get("description") or "", "parameters": one.get(schema),
        }} for one in body.get("tools") or ()
    ]


def text_of(content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """A content that is a text, or a list of parts of these kinds. Raises TaskError for one that holds another part."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise TaskError(f"a part of type {part.get('type')!r} cannot be read here: give parts of type {kinds[0]}")
    return "".join(part["text"] for part in content)


def ruled(options: dict[str, Any], sampling: Mapping[str, Any]) -> list[str]:
    """Replace what the run's settings replace; returns it as `name=value`."""
    changed = []
    if options.get("train", True):
        for name in SAMPLING:
            given = options.pop(name, None)
            if given is not None and given != sampling[name]:
                changed.append(f"{name}={sampling[name]}")
    for name in ("max_tokens", "max_completion_tokens"):
        given = options.get(name)
        if isinstance(given, int) and given > sampling["max_new_tokens"]:
            changed.append(f"{name}={sampling['max_new_tokens']}")
    return changed


def event(value: Mapping[str, Any], *, named: bool = False) -> bytes:
    """A server-sent event; `named` by its type, as Anthropic's and those of responses are."""
    name = f"event: {value['type']}\n" if named else ""
    return f"{name}data: {json.dumps(value)}\n\n".encode()


# --- POST /v1/chat/completions ----------------------------------------------------------------------------------------

CHAT_NAMES = SAME | {name: name for name in ("messages", "tools", "max_tokens", "max_completion_tokens", "stop")}


def _chat_options(body: Body, session: Session) -> dict[str, Any]:
    return picked(body, CHAT_NAMES)


def _chat_answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
    """The whole answer; token ids and log-probs if the request asks for them."""
    found = asdict(completion)
    (choice,) = found["choices"]
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    if not body.get("return_token_ids"):
        del found["prompt_token_ids"], choice["token_ids"]
    choice["logprobs"] = None
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [
            {"token": said.decode(errors="replace"), "logprob": logprob, "bytes": list(said), "top_logprobs": []}
            for said, logprob in zip(map(session.client.token_bytes, token_ids), logprobs, strict=True)
        ]}
    return {"created": 0, "model": body.get("model") or "policy", **found}


def _chat_events(whole: Mapping[str, Any], body: Body) -> Iterator[bytes]:
    """The message, its end, and the usage if the request asks for it."""
    (choice,) = whole["choices"]
    head = {**whole, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    message = dict(choice["message"])
    calls = message.pop("tool_calls") or []
    if calls:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    rest = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
    yield event({**head, "choices": [{**rest, "delta": message, "finish_reason": None}]})
    head.pop("prompt_token_ids", None)
    yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


CHAT = Form(ChatFields, _chat_options, _chat_answer, _chat_events)


# --- POST /v1/responses -----------------------------------------------------------------------------------------------

RESPONSES_NAMES = SAME | {"max_output_tokens": "max_tokens"}
TEXTS = ("input_text", "output_text", "text")


def _responses_options(body: Body, session: Session) -> dict[str, Any]:
    found = picked(body, RESPONSES_NAMES)
    form = ((body.get("text") or {}).get("format") or {"type": "text"}).get("type")
    if form != "text":
        raise TaskError(f"POST /v1/responses does not take text.format={form}: ask for the form in words")
    return {**found, "messages": _with_instructions(body, _conversation(body, session)),
            "tools": tools_of(body, "parameters")}


def _with_instructions(body: Body, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the instructions first; those of an earlier response are not taken over."""
    return [{"role": "system", "content": body["instructions"]}, *messages] if body.get("instructions") else messages


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


def _responses_answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
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


def _responses_events(whole: Mapping[str, Any], body: Body) -> Iterator[bytes]:
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


RESPONSES = Form(ResponsesFields, _responses_options, _responses_answer, _responses_events)


# --- POST /v1/messages ------------------------------------------------------------------------------------------------

MESSAGES_NAMES = SAME | {"max_tokens": "max_tokens", "stop_sequences": "stop"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_options(body: Body, session: Session) -> dict[str, Any]:
    """Also of a request that only counts tokens."""
    choice = (body.get("tool_choice") or {"type": "auto"})["type"]
    found = {**picked(body, MESSAGES_NAMES), "tool_choice": choice}
    return {**found, "messages": _messages(body), "tools": tools_of(body, "input_schema")}


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


def _messages_answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
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


def _messages_events(whole: Mapping[str, Any], body: Body) -> Iterator[bytes]:
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


MESSAGES = Form(MessagesFields, messages_options, _messages_answer, _messages_events)
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def error_json(status: int, code: str, message: str) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


# --- POST /inference/v1/generate --------------------------------------------------------------------------------------

TOKENS_NAMES = {name: name for name in ("max_tokens", "stop", *SAMPLING)}


def _tokens_options(body: Body, session: Session) -> dict[str, Any]:
    params, ids, largest = body.get("sampling_params") or {}, body["token_ids"], session.client.vocab_size - 1
    if max(ids) > largest:
        raise TaskError(f"token_ids holds {max(ids)}: give a list of ids from 0 to {largest}")
    found = picked(params, TOKENS_NAMES)
    stop = found.pop("stop", None) or []
    stops = [stop] if isinstance(stop, str) else list(stop)
    stops += _texts_of(params.get("stop_token_ids") or (), session)
    train = {} if body.get("train") is None else {"train": body["train"]}
    return {**found, **train, "messages": ids, "stop": stops}


def _texts_of(ids: Sequence[int], session: Session) -> Iterator[str]:
    """Stop tokens as the texts by which the engine knows them; the end of a sequence ends it anyway."""
    tokenizer = session.client.tokenizer
    for one in ids:
        text = tokenizer.decode([one]) if one < len(tokenizer) else ""
        if not text or "\ufffd" in text:
            raise TaskError(f"stop_token_ids holds {one}, which is not text by itself: give ids of whole characters")
        if one != tokenizer.eos_token_id:
            yield text


def _tokens_answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
    (choice,) = completion.choices
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
    ]
    return {
        "request_id": body.get("request_id") or completion.id, "prompt_token_ids": completion.prompt_token_ids,
        "choices": [{"index": 0, "token_ids": choice.token_ids, "logprobs": {"content": content},
                     "finish_reason": choice.finish_reason}],
        "usage": completion.usage,
    }


TOKENS = Form(TokensFields, _tokens_options, _tokens_answer, events=None)
