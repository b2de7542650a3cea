"""A real actor that does not report what it did, for tests: python -m tests.fakes.lying_actor LIE connect=...

    offset   log-probs half a nat above those that it drew with
    rewards  every answer is worth 1
    short    every answer is its first token
    draws    tokens of other seeds than those of its leases, with their true log-probs
"""

import logging
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from actors.__main__ import main
from actors.engines.base import GenerateRequest, Generation
from actors.engines.native.engine import NativeEngine
from actors.episode import EpisodeRunner

OFFSET_NATS = 0.5


def lie(kind: str) -> None:
    """Replace what this lie is about in this process."""
    generate: Callable[..., Awaitable[Generation]] = NativeEngine.generate
    play: Callable[..., Awaitable[Any]] = EpisodeRunner.play

    async def lying_generate(self: NativeEngine, request: GenerateRequest) -> Generation:
        if kind == "draws":
            request = replace(request, seed=request.seed ^ 0x5EED)
        made = await generate(self, replace(request, max_new_tokens=1) if kind == "short" else request)
        if kind == "offset":
            made = replace(made, logprobs=[min(-1e-6, one + OFFSET_NATS) for one in made.logprobs])
        return made

    async def lying_play(self: EpisodeRunner, *given: Any, **named: Any) -> Any:
        member = await play(self, *given, **named)
        if kind != "rewards":
            return member
        turns = tuple(msgspec.structs.replace(turn, reward=1.0 / len(member.turns)) for turn in member.turns)
        return msgspec.structs.replace(member, turns=turns, reward=1.0, scores={"score": 1.0})

    NativeEngine.generate, EpisodeRunner.play = lying_generate, lying_play


if __name__ == "__main__":
    lie(sys.argv.pop(1))
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
