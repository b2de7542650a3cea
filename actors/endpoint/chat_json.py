"""Chat completions as JSON: the form of OpenAI, and the token ids that vLLM adds where `return_token_ids` asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from actors.endpoint.form import Body, Form, event
from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion
from streamrl.errors import TaskError

OF_ANSWER = ("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids")
"""What a request says of the form of its answer."""


def _options(body: Body, session: Session) -> dict[str, Any]:
    if not isinstance(body.get("messages"), list):
        raise TaskError(f"messages is {body.get('messages')!r:.60}: give a list of messages")
    if body.get("top_logprobs"):
        raise TaskError(f"top_logprobs={body['top_logprobs']!r:.20}: take 0, only sampled tokens have log-probs here")
    return {name: value for name, value in body.items() if name not in OF_ANSWER}


def _answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
    """The whole answer; token ids and log-probs if the request asks for them."""
    found = asdict(completion)
    (choice,) = found["choices"]
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    if not body.get("return_token_ids"):
        del found["prompt_token_ids"], choice["token_ids"]
    choice["logprobs"] = None
    if body.get("logprobs"):
        texts = [session.client.tokenizer.decode([one]) for one in token_ids]
        choice["logprobs"] = {"content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
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


CHAT = Form(_options, _answer, _events)
