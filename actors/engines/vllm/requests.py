"""One sequence in vLLM's terms and back: what is asked, and what its answer must hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from actors.engines.base import GenerateRequest, Generation, VersionSpan
from actors.engines.native.sampling import check_sampling
from streamrl.errors import EngineError
from streamrl.messages import VersionRef

LOWEST_TEMPERATURE = 0.01  # vLLM silently raises anything below to this, and records log-probs of what it did
_WORD = (1 << 64) - 1


def check_request(request: GenerateRequest, max_tokens: int, vocab_size: int) -> None:
    """Refuse what cannot be generated.

    Raises:
        EngineError: names the value.
    """
    check_sampling(request.sampling)
    if 0 < request.sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineError(f"temperature={request.sampling.temperature}: vLLM goes down to 0.01, or 0 for greedy")
    num_prompt = len(request.prompt_ids)
    if num_prompt < 1 or request.max_new_tokens < 1:
        raise EngineError(f"a request needs a prompt and room: {num_prompt} tokens, {request.max_new_tokens} new")
    if num_prompt + request.max_new_tokens > max_tokens:
        raise EngineError(
            f"prompt of {num_prompt} tokens and max_new_tokens={request.max_new_tokens} exceed the engine's "
            f"max_tokens={max_tokens}: shorten one or build the engine with more"
        )
    if not all(0 <= token < vocab_size for token in request.prompt_ids):
        raise EngineError(f"a prompt token lies outside the vocabulary of {vocab_size}")
    if not all(request.stop):
        raise EngineError("an empty stop string would end every sequence at once")


def sampling_arguments(request: GenerateRequest, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of SamplingParams. The end-of-sequence ids are ours, so that every engine ends alike."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p,
        "top_k": max(sampling.top_k, 0), "max_tokens": request.max_new_tokens, "seed": turn_seed(request),
        "ignore_eos": True, "stop_token_ids": [] if request.ignore_eos else list(eos_ids),
        "stop": list(request.stop), "include_stop_str_in_output": True, "detokenize": bool(request.stop),
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "logprobs": 0, "flat_logprobs": True,
    }


def check_scoring(token_ids: Sequence[int], start: int, temperature: float, context: int) -> None:
    """Refuse what cannot be scored; one token of the context is kept for the one that vLLM must sample.

    Raises:
        EngineError: names the values.
    """
    if not 1 <= start <= len(token_ids) < context or temperature != 1.0:
        raise EngineError(
            f"score needs 1 <= start <= tokens < {context} and temperature 1; "
            f"got start={start}, {len(token_ids)} tokens, temperature={temperature}"
        )


def scoring_arguments() -> dict[str, Any]:
    """Keyword arguments of SamplingParams for log-probs of the prompt alone."""
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}


def scores_of(rows: Any, token_ids: Sequence[int], start: int) -> list[float]:
    """The log-probs of token_ids[start:] from vLLM's `prompt_logprobs`."""
    return [float(rows[place][token_ids[place]].logprob) for place in range(start, len(token_ids))]


def turn_seed(request: GenerateRequest) -> int:
    """Below 2**63. vLLM counts draws from 0 in every request, so the prompt's length must tell turns apart."""
    mixed = (request.seed * 0x9E3779B97F4A7C15 + len(request.prompt_ids) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & _WORD
    return mixed >> 1


def generation_of(output: Any, greedy: bool) -> Generation:
    """A finished CompletionOutput as ours.

    Raises:
        EngineError: log-probs or version labels are missing, or are no numbers and no versions.
    """
    token_ids = list(output.token_ids)
    logprobs = [float(number) for number in output.logprobs.logprobs] if output.logprobs is not None else []
    if len(logprobs) != len(token_ids) or not all(map(math.isfinite, logprobs)):
        raise EngineError(f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens, or some are no numbers")
    spans = spans_of(output.weight_versions, len(token_ids))
    # Greedy is a distribution of its own, with all its mass on the token taken.
    return Generation(token_ids, [0.0] * len(token_ids) if greedy else logprobs, spans, output.finish_reason or "abort")


def spans_of(spans: Any, num_tokens: int) -> list[VersionSpan]:
    """vLLM's spans of labels as versions.

    Raises:
        EngineError: a label that we did not set, or tokens without one.
    """
    found: list[VersionSpan] = []
    for span in spans or ():
        epoch, _, version = span.version.partition(":")
        if not (epoch.isdecimal() and version.isdecimal()):
            raise EngineError(f"vLLM labeled tokens with {span.version!r}, which is no version")
        if span.end > span.start:
            found.append(VersionSpan(VersionRef(int(epoch), int(version)), span.start, span.end))
    covered = found[-1].end if found else 0
    if covered != num_tokens:
        raise EngineError(f"vLLM's version labels cover {covered} of {num_tokens} tokens")
    return found
