"""Tokens in, tokens out: the form of vLLM's `/inference/v1/generate`, for clients that render prompts themselves."""

from __future__ import annotations

from typing import Any

from actors.endpoint.form import SAMPLING, Body, Form, picked
from actors.endpoint.sessions import Session
from actors.trajectory.chat_form import ChatCompletion
from streamrl.errors import TaskError

ROUTE = "POST /inference/v1/generate"
READ = ("token_ids", "sampling_params", "stream", "train")
IGNORED = ("model", "request_id", "cache_salt", "priority", "return_token_ids")
NAMES = {name: name for name in ("max_tokens", "stop", "n", *SAMPLING)}
IGNORED_SAMPLING = ("stop_token_ids", "logprobs", "skip_special_tokens", "spaces_between_special_tokens", "seed",
                    "include_stop_str_in_output", "detokenize")


def _options(body: Body, session: Session) -> dict[str, Any]:
    picked(body, {}, READ + IGNORED, ROUTE)
    if body.get("stream"):
        raise TaskError(f"{ROUTE} does not take stream=true: leave it out")
    params = body.get("sampling_params") or {}
    found = picked(params, NAMES, IGNORED_SAMPLING, f"{ROUTE}: sampling_params")
    tokenizer, ids = session.client.tokenizer, body.get("token_ids")
    known = range(len(tokenizer))
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one in known for one in ids):
        raise TaskError(f"token_ids is {ids!r:.60}: give a list of ids from 0 to {len(tokenizer) - 1}")
    stop = found.pop("stop", None) or []
    stops = [stop] if isinstance(stop, str) else list(stop)
    # The end of a sequence ends it anyway, and the engine knows other ends as texts.
    stops += [
        tokenizer.decode([one]) for one in params.get("stop_token_ids") or () if one != tokenizer.eos_token_id
    ]
    train = {} if body.get("train") is None else {"train": body["train"]}
    return {**found, **train, "messages": ids, "stop": stops}


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


TOKENS = Form(_options, _answer, events=None)
