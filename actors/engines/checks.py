"""What every engine refuses before it runs; the error names the value and the limit."""

from __future__ import annotations

import math

from actors.engines.base import INSTALL_POLICIES, GenerateRequest
from streamrl.errors import EngineError
from streamrl.messages import Sampling


def check_install_policy(policy: str) -> None:
    if policy not in INSTALL_POLICIES:
        raise EngineError(f"install_policy={policy!r} is unknown: choose one of {INSTALL_POLICIES}")


def check_request(request: GenerateRequest, max_tokens: int, vocab_size: int) -> None:
    """Raise EngineError for a request that cannot be generated within `max_tokens`."""
    check_sampling(request.sampling)
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


def check_sampling(sampling: Sampling) -> None:
    """Raise EngineError for what is no distribution."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        raise EngineError(f"temperature={sampling.temperature} must be finite and at least 0 (0 is greedy)")
    if not 0.0 < sampling.top_p <= 1.0:
        raise EngineError(f"top_p={sampling.top_p} must be in (0, 1] (1 keeps everything)")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise EngineError(f"min_p={sampling.min_p} must be in [0, 1] (0 keeps everything)")
    if sampling.top_k < -1:
        raise EngineError(f"top_k={sampling.top_k} must be positive, or -1 or 0 to keep everything")
