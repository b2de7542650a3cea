"""Chat completions as JSON: the form of OpenAI, and the token ids that vLLM adds where `return_token_ids` asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from actors.endpoint.fields import ChatFields
from actors.endpoint.form import SAMPLING, Body, Form, event, picked
from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion

NAMES = ("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "train", *SAMPLING)


def _options(body: Body, session: Session) -> dict[str, Any]:
    return picked(body, {name: name for name in NAMES})


def _answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
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


def _events(whole: Mapping[str, Any], body: Body) -> Iterator[bytes]:
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


CHAT = Form(ChatFields, _options, _answer, _events)
