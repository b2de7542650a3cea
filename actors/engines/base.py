"""What the actor asks of an inference engine, and nothing more: token ids in, token ids out.

An engine runs its own thread or process and keeps it full by itself: every `generate` call that arrives is admitted at
the next step, whatever else is running. Weights are exchanged between two forward passes; running sequences live on
with their KV cache, and their later tokens carry the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from streamrl.messages import Sampling, VersionRef


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue.

    Args:
        prompt_ids: everything before the first new token.
        sampling: the processed distribution: temperature (0 = greedy), top-p, top-k (-1 = off), min-p.
        max_new_tokens: never exceeded.
        seed: the draw is a function of (seed, position, distribution) alone, not of what else is in the batch.
        stop: generation ends after the first text that contains one of these; the stop string stays in the output.
        ignore_eos: go on to max_new_tokens whatever is sampled (benchmarks).
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """New tokens start..end (half open) were sampled with these weights."""

    ref: VersionRef
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What came out. `logprobs` are of the sampled token under the processed distribution (0.0 for greedy)."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish: str  # "stop" (eos or stop string), "length" or "abort"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the present load.

    `blocked`: whatever is asked now rightly waits, for sequences that must end first or for a core that is being
    started. The engine promises that this ends by itself; otherwise a counter that moves is its sign of life.
    """

    tokens_total: int = 0
    prefill_tokens_total: int = 0
    steps_total: int = 0
    running: int = 0
    waiting: int = 0
    busy_s: float = 0.0
    blocked: bool = False
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstallTimes:
    """How long running sequences stood still, and the whole install, in seconds."""

    pause_s: float
    install_s: float


class Engine(Protocol):
    """One copy of the policy. Methods are called from one asyncio loop; `close` may be called twice."""

    name: str
    slots: int  # sequences that run at once

    @property
    def installed(self) -> VersionRef | None: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Run one sequence to its end. Cancelling the awaiting task aborts the sequence. Raises EngineError."""
        ...

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """Load a complete verified document (checkpoint names to torch tensors, tied copies left out) between two
        forward passes. The names must equal the model's; else WeightsError and the old version goes on serving."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that can also say how likely given tokens are; the probe of the weight plane asks it.

    Optional: an engine without this method is checked by its digests only. The weights must not change between the
    first and the last token of one call; the installer never calls it while an install is under way.
    """

    async def score(self, token_ids: list[int], *, start: int, temperature: float) -> list[float]:
        """Natural log-probs of token_ids[start:], each given everything before it, under softmax(logits / temperature)
        of the installed weights: no top-p, no top-k, no min-p. len(token_ids) - start numbers.

        Raises:
            EngineError: no weights yet, start < 1, temperature <= 0 or too many tokens.
        """
        ...


@runtime_checkable
class ExposesWeights(Protocol):
    """An engine that can show the tensors it computes with, for a comparison with the document they came from.

    Optional: engines that fuse or pack their weights cannot.
    """

    def live_tensors(self) -> Mapping[str, Any]:
        """Checkpoint name to the live torch tensor that the document's tensor of that name filled, in the engine's own
        type and on its own device. Read them, never write them; they are what they are until the next install."""
        ...


EngineFactory = Callable[..., Engine]
