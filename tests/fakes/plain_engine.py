"""An engine without a model: it answers at once, for tests and benchmarks of the protocol around it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from actors.engines.base import EngineSpec, EngineStats, GenerateRequest, Generation, InstallTimes, VersionSpan
from streamrl.errors import EngineError
from streamrl.messages import VersionRef

_MASK = (1 << 64) - 1


def scripted_tokens(prompt_ids: Sequence[int], seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """`num_tokens` ids that look random and depend on the prompt's length, its last token and the seed only."""
    state = (seed * 0x9E3779B97F4A7C15 + len(prompt_ids) * 0xBF58476D1CE4E5B9 + prompt_ids[-1]) & _MASK
    tokens = []
    for _ in range(num_tokens):
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        tokens.append((state >> 33) % vocab_size)
    return tokens


class ScriptedEngine:
    """Answers with `scripted_tokens`; no tensor library, no thread."""

    name = "scripted"

    def __init__(self, *, max_num_seqs: int = 64, num_tokens: int = 8, vocab_size: int = 256) -> None:
        self.max_num_seqs, self._num_tokens, self._vocab_size = max_num_seqs, num_tokens, vocab_size
        self.installed: VersionRef | None = None
        self._free = asyncio.Semaphore(max_num_seqs)
        self._ready = asyncio.Event()
        self._closed = False
        self._running = self._waiting = self._tokens_total = self._steps_total = self._installs = 0

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> ScriptedEngine:
        num_tokens = min(8, spec.max_new_tokens)
        return cls(max_num_seqs=spec.max_num_seqs, num_tokens=num_tokens, vocab_size=len(spec.tokenizer))

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`; waits for the first install and for a free place."""
        self._waiting += 1
        try:
            await self._ready.wait()
            await self._free.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            return await self._run(request)
        finally:
            self._running -= 1
            self._free.release()

    async def _run(self, request: GenerateRequest) -> Generation:
        if self._closed or self.installed is None:
            raise EngineError("the engine is closed")
        tokens = scripted_tokens(request.prompt_ids, request.seed, self._num_tokens, self._vocab_size)
        tokens = tokens[: request.max_new_tokens]
        self._tokens_total += len(tokens)
        self._steps_total += 1
        finish = "length" if len(tokens) >= request.max_new_tokens else "stop"
        return Generation(tokens, [-1.0] * len(tokens), [VersionSpan(self.installed, 0, len(tokens))], finish)

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        if self._closed:
            raise EngineError("the engine is closed")
        self.installed = ref
        self._installs += 1
        self._ready.set()
        return InstallTimes(pause_s=0.0, install_s=0.0)

    def stats(self) -> EngineStats:
        return EngineStats(
            tokens_total=self._tokens_total, steps_total=self._steps_total, running=self._running,
            waiting=self._waiting, extra={"dead": float(self._closed), "installs": float(self._installs)},
        )

    async def close(self) -> None:
        """Fail every request that waits for weights with an EngineError."""
        self._closed = True
        self._ready.set()
