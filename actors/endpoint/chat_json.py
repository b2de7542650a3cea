"""Chat completions as JSON: the form of OpenAI, and the token ids that vLLM adds where `return_token_ids` asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from actors.trajectory.chat_form import ChatCompletion
from streamrl.errors import TaskError

FORM = ("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids")
"""What a request says of the form of its answer."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def options_of(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of the call, and what of them the run's settings replace. Raises TaskError for what is not served."""
    options = {name: value for name, value in body.items() if name not in FORM}
    if not isinstance(body.get("messages"), list):
        raise TaskError(f"messages is {body.get('messages')!r:.60}: give a list of messages")
    if body.get("top_logprobs"):
        raise TaskError(f"top_logprobs={body['top_logprobs']!r:.20}: take 0, only sampled tokens have log-probs here")
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
    return options, changed


def completion_json(answer: ChatCompletion, body: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The whole answer; token ids and log-probs if the request asks for them."""
    found = asdict(answer)
    (choice,) = found["choices"]
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    if not body.get("return_token_ids"):
        del found["prompt_token_ids"], choice["token_ids"]
    choice["logprobs"] = None
    if body.get("logprobs"):
        texts = [tokenizer.decode([one]) for one in token_ids]
        choice["logprobs"] = {"content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]}
    return {"created": 0, "model": body.get("model") or "policy", **found}


def chunks(whole: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[bytes]:
    """The answer as server-sent events: the message, its end, and the usage if the request asks for it."""
    (choice,) = whole["choices"]
    head = {**whole, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    message = dict(choice["message"])
    calls = message.pop("tool_calls") or []
    if calls:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    rest = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
    yield _event({**head, "choices": [{**rest, "delta": message, "finish_reason": None}]})
    head.pop("prompt_token_ids", None)
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**head, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
