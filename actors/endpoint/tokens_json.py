"""Tokens in, tokens out: the form of vLLM's `/inference/v1/generate`, for clients that render prompts themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from actors.endpoint.fields import TokensFields
from actors.endpoint.form import SAMPLING, Body, Form, picked
from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion
from streamrl.errors import TaskError

NAMES = {name: name for name in ("max_tokens", "stop", *SAMPLING)}


def _options(body: Body, session: Session) -> dict[str, Any]:
    params, ids, largest = body.get("sampling_params") or {}, body["token_ids"], session.client.vocab_size - 1
    if max(ids) > largest:
        raise TaskError(f"token_ids holds {max(ids)}: give a list of ids from 0 to {largest}")
    found = picked(params, NAMES)
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
            raise TaskError(f"stop_token_ids holds {one}, which is no text of its own: give ids of whole characters")
        if one != tokenizer.eos_token_id:
            yield text


def _answer(completion: ChatCompletion, body: Body, session: Session) -> dict[str, Any]:
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


TOKENS = Form(TokensFields, _options, _answer, events=None)
