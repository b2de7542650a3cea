"""The scripted engine with what tests need: replies, steps, a gate that holds them, and records of every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.engines.base import EngineSpec, GenerateRequest, Generation, InstallTimes, VersionSpan
from streamrl.errors import EngineError
from streamrl.messages import VersionRef
from tests.fakes.plain_engine import ScriptedEngine as PlainEngine
from tests.fakes.plain_engine import scripted_tokens

Reply = Callable[[Sequence[int], int, VersionRef], Sequence[int]]


class ScriptedEngine(PlainEngine):
    """Generates what a function says; time passes only where the test lets it.

    Args:
        reply: (prompt_ids, seed, version) -> the tokens of this version. A sequence that lives through an install
            continues with the new version's reply, from the place it had reached. None: `scripted_tokens`.
        tokens_per_step: after so many tokens a sequence yields to others and passes `gate`; None: all in one step.
        gate: an event that must be set for a step to happen; None: always open.

    Attributes:
        tensors: the mapping of the last install.
        installs, requests: every version installed and every request started, in order.
    """

    def __init__(
        self, reply: Reply | None = None, *, tokens_per_step: int | None = None, gate: asyncio.Event | None = None,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.tensors: Mapping[str, Any] = {}
        self.installs: list[VersionRef] = []
        self.requests: list[GenerateRequest] = []
        self._reply = reply or (lambda ids, seed, _: scripted_tokens(ids, seed, self._num_tokens, self._vocab_size))
        self._tokens_per_step, self._gate = tokens_per_step, gate

    async def _run(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        tokens: list[int] = []
        spans: list[VersionSpan] = []
        while True:
            if self._gate is not None:
                await self._gate.wait()
            if self._closed:
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
        times = await super().install(tensors, ref)
        self.tensors = tensors
        self.installs.append(ref)
        return times

    async def close(self) -> None:
        """Open requests fail too: their gate is opened for that."""
        await super().close()
        if self._gate is not None:
            self._gate.set()


def recording(spec: EngineSpec) -> ScriptedEngine:
    """Engine for `actors.engine=tests.fakes.scripted_engine:recording`."""
    return ScriptedEngine.from_spec(spec)
