"""An engine without a model: it answers what a function says, at once or as a gate lets it, and records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.engines.base import EngineSpec, EngineStats, GenerateRequest, Generation, InstallTimes, VersionSpan
from streamrl.errors import EngineError
from streamrl.messages import VersionRef

Reply = Callable[[Sequence[int], int, VersionRef], Sequence[int]]
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
    """Generates without a tensor library or a thread; time passes only where the test lets it.

    Args:
        reply: (prompt_ids, seed, version) -> the tokens of this version. A sequence that lives through an install
            continues with the new version's reply, from the place it had reached. None: `scripted_tokens`.
        tokens_per_step: after so many tokens a sequence yields to others and passes `gate`; None: all in one step.
        gate: an event that must be set for a step to happen; None: always open.

    Attributes:
        tensors: the mapping of the last install.
        installs, requests: every version installed and every request started, in order.
    """

    name = "scripted"

    def __init__(
        self, reply: Reply | None = None, *, tokens_per_step: int | None = None, gate: asyncio.Event | None = None,
        max_num_seqs: int = 64, num_tokens: int = 8, vocab_size: int = 256,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.tensors: Mapping[str, Any] = {}
        self.installs: list[VersionRef] = []
        self.requests: list[GenerateRequest] = []
        self._reply = reply or (lambda ids, seed, _: scripted_tokens(ids, seed, num_tokens, vocab_size))
        self._tokens_per_step, self._gate = tokens_per_step, gate
        self._free = asyncio.Semaphore(max_num_seqs)
        self._ready = asyncio.Event()
        self._closed = False
        self._running = self._waiting = self._tokens_total = self._steps_total = 0

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> ScriptedEngine:
        num_tokens = min(8, spec.max_new_tokens)
        return cls(max_num_seqs=spec.max_num_seqs, num_tokens=num_tokens, vocab_size=len(spec.tokenizer))

    @property
    def installed(self) -> VersionRef | None:
        return self.installs[-1] if self.installs else None

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
        self.requests.append(request)
        tokens: list[int] = []
        spans: list[VersionSpan] = []
        while True:
            if self._gate is not None:
                await self._gate.wait()
            if self._closed or not self.installs:
                raise EngineError("the engine is closed")
            ref = self.installs[-1]
            text = list(self._reply(request.prompt_ids, request.seed, ref))[: request.max_new_tokens]
            start = len(tokens)
            tokens += text[start : None if self._tokens_per_step is None else start + self._tokens_per_step]
            self._tokens_total += len(tokens) - start
            self._steps_total += 1
            if spans and spans[-1].ref == ref:
                spans[-1] = VersionSpan(ref, spans[-1].start, len(tokens))
            elif len(tokens) > start:
                spans.append(VersionSpan(ref, start, len(tokens)))
            if len(tokens) >= len(text):
                finish = "length" if len(tokens) >= request.max_new_tokens else "stop"
                return Generation(tokens, [-1.0] * len(tokens), spans, finish)
            await asyncio.sleep(0)

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        if self._closed:
            raise EngineError("the engine is closed")
        self.tensors = tensors
        self.installs.append(ref)
        self._ready.set()
        return InstallTimes(pause_s=0.0, install_s=0.0)

    def stats(self) -> EngineStats:
        return EngineStats(
            tokens_total=self._tokens_total, steps_total=self._steps_total, running=self._running,
            waiting=self._waiting, extra={"dead": float(self._closed), "installs": float(len(self.installs))},
        )

    async def close(self) -> None:
        """Fail every request that waits for weights, or at the gate, with an EngineError."""
        self._closed = True
        self._ready.set()
        if self._gate is not None:
            self._gate.set()


def recording(spec: EngineSpec) -> ScriptedEngine:
    """Engine for `actors.engine=tests.fakes.scripted_engine:recording`."""
    return ScriptedEngine.from_spec(spec)
