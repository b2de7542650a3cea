"""The protocol of an inference engine: token ids in, token ids out.

An engine runs a thread or process of its own and batches by itself: every `generate` call that arrives is admitted at
the next step, whatever else is running. Weights are exchanged between two forward passes; running sequences live on
with their KV cache, and their later tokens carry the new version.

One of your own needs `Engine`, and a factory that takes an `EngineSpec`; `ScoresTokens`, `ExposesWeights` and
`GivesMemoryBack` are optional. `actors.engine=package.module:factory` uses it; one of ours is an entry of
`streamrl.config.rules.ENGINES`. A class may give its factory as `from_spec`. Only the engine that is chosen is
imported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from streamrl.config.rules import ENGINES
from streamrl.errors import ConfigError, RequestError
from streamrl.extension import import_attribute, resolve
from streamrl.messages import Sampling, VersionRef


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The adapters of a run (`streamrl.weights.adapter`): which layers have one, its largest rank, and its scale."""

    layers: tuple[str, ...]
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The arguments of an engine factory.

    Args:
        model_dir: the model's configuration and tokenizer files, deleted after the build; weights come by `install`.
        tokenizer: of transformers.
        max_num_seqs: sequences that run at once (`actors.num_concurrent`).
        max_tokens: prompt and new tokens of one sequence together.
        max_new_tokens: of one turn in training.
        device, dtype: where and in what type it computes.
        weights: "full", or "int8": matrices are rounded to it as they come (`actors.weights`).
        num_threads: on a CPU; None leaves the choice to torch.
        install_policy: running sequences at an install: "continue" keeps their cache, "recompute" reads it again with
            the new weights, "drain" admits nothing, lets them finish, then installs. An engine that takes adapters
            has room for several: under "drain" it installs at once, and running sequences end with their own.
        options: the engine's own arguments (`actors.vllm.*`).
        adapter: versions are adapters; None if they are whole models. Only an engine that `TakesAdapters` need read it.
        memory_share: part of its GPU's memory that it may plan with (`actors.gpu_memory_share`); None is what is free.
        num_device_documents: whole documents that the actor holds on the GPU beside the engine, for ipc and nccl.
        takes_turns: `GivesMemoryBack.release` will be called (`launch.share_gpus=turns`).
    """

    model_dir: Path
    tokenizer: Any
    max_num_seqs: int
    max_tokens: int
    max_new_tokens: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    num_threads: int | None = None
    install_policy: str = "continue"
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: AdapterSpec | None = None
    memory_share: float | None = None
    num_device_documents: int = 0
    weights: str = "full"
    takes_turns: bool = False


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
        version: that began the episode; an engine under "drain" with adapters goes on with it if it still has it.
        wants_sets: the ids that each token is drawn from are needed (`Generation.sets`), as training does.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    version: VersionRef | None = None
    wants_sets: bool = False


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """New tokens start..end (half open) were sampled with these weights."""

    ref: VersionRef
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A turn as an engine generated it."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled tokens under the processed distribution, 0.0 for greedy
    spans: list[VersionSpan]
    finish: str  # "stop" (eos or stop string), "length" or "abort"
    sets: list[np.ndarray] | None = None  # the ids that each token was drawn from, ascending; None: not recorded


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the present load.

    `blocked`: requests wait for a known reason that ends by itself, as sequences that must end first or a core that is
    starting. Otherwise the watchdog takes a counter that moves as progress. `extra["dead"]` is 1.0 for a dead engine.
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
    """Durations of an install in seconds: the pause of running sequences, and the whole."""

    pause_s: float
    install_s: float


class Engine(Protocol):
    """One copy of the policy. Methods are called from one asyncio loop; `close` may be called twice."""

    name: str
    max_num_seqs: int  # sequences that run at once
    # May be left out: `returns_sets = True`, `Generation.sets` of top-p, top-k and min-p, which training needs, and
    # `vocab_size`, below which all ids of a prompt must be; without it that is the tokenizer's length; and `max_tokens`
    # of one sequence.

    @property
    def installed(self) -> VersionRef | None: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Run one sequence to its end, after the first install. Cancelling aborts it.

        Raises:
            RequestError: this request cannot be served, by any engine like this. EngineError: the engine failed.
        """
        ...

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """Load a complete document (checkpoint names to tensors, tied copies left out) between two forward passes.

        Raises:
            WeightsError: the names are not the model's; the old version goes on serving.
            EngineError: the engine is dead. Any other exception means a mixed model: the old document is loaded again.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that scores given tokens, for the weight probe; never called during an install."""

    async def score(self, token_ids: list[int], *, start: int, temperature: float) -> list[float]:
        """Natural log-probs of token_ids[start:] under softmax(logits / temperature): no top-p, top-k or min-p.

        Raises:
            EngineError: no weights yet, start < 1, temperature <= 0 or too many tokens.
        """
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that adds an adapter to its weights; for any other one, each version is merged with the base."""

    async def install_base(self, tensors: Mapping[str, Any]) -> None:
        """Load the weights under all adapters, before the first of them; again when they were damaged.

        Raises: as `Engine.install`.
        """
        ...

    async def install_adapter(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """Take an adapter between two forward passes. Raises: as `Engine.install`."""
        ...


@runtime_checkable
class ExposesWeights(Protocol):
    """An engine that shows the tensors it computes with, for a bitwise comparison with the document."""

    def live_tensors(self) -> Mapping[str, Any]:
        """Checkpoint name to the live tensor it filled, in the engine's own type and on its own device; read only."""
        ...


@runtime_checkable
class GivesMemoryBack(Protocol):
    """An engine that can leave its memory to others for a while (`launch.share_gpus=turns`)."""

    async def release(self) -> None:
        """Give weights and cache back to the system; `installed` is None from here to the next install.

        That install, or `install_base` before it, takes new memory. May be called again before it. Sequences that run
        or wait fail with an EngineError.

        Raises:
            EngineError: the engine is dead.
        """
        ...


EngineFactory = Callable[[EngineSpec], Engine]


LARGEST_TOP_K = (1 << 31) - 1
LOWEST_TEMPERATURE = 1e-6
"""But for 0: logits divided by less are no longer finite in float32."""


def end_of_sequence_ids(*sources: Any) -> frozenset[int]:
    """Every token that ends a sequence, by a model's configuration, its generation settings and its tokenizer."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


def check_request(request: GenerateRequest, max_tokens: int, vocab_size: int) -> None:
    """Raise RequestError for a request that cannot be generated within `max_tokens`."""
    check_sampling(request.sampling)
    num_prompt = len(request.prompt_ids)
    if num_prompt < 1 or request.max_new_tokens < 1:
        raise RequestError(f"a request needs a prompt and room: {num_prompt} tokens, {request.max_new_tokens} new")
    if num_prompt + request.max_new_tokens > max_tokens:
        raise RequestError(
            f"prompt of {num_prompt} tokens and max_new_tokens={request.max_new_tokens} exceed the engine's "
            f"max_tokens={max_tokens}: shorten one or build the engine with more"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        raise RequestError(f"a prompt token lies outside the vocabulary of {vocab_size}")
    if not all(request.stop):
        raise RequestError("an empty stop string would end every sequence at once")
    if any("\ud800" <= char <= "\udfff" for stop in request.stop for char in stop):
        raise RequestError("a stop string holds half a surrogate pair, which no text has: leave it out")


def check_sampling(sampling: Sampling) -> None:
    """Raise RequestError for numbers that are no distribution, or cannot be computed."""
    temperature = sampling.temperature
    if temperature != 0.0 and not (math.isfinite(temperature) and temperature >= LOWEST_TEMPERATURE):
        raise RequestError(
            f"temperature={temperature} must be 0, which is greedy, or finite and at least {LOWEST_TEMPERATURE}"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestError(f"top_p={sampling.top_p} must be in (0, 1] (1 keeps everything)")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise RequestError(f"min_p={sampling.min_p} must be in [0, 1] (0 keeps everything)")
    if not -1 <= sampling.top_k <= LARGEST_TOP_K:
        raise RequestError(
            f"top_k={sampling.top_k} must be positive and at most {LARGEST_TOP_K}, or -1 or 0 to keep everything"
        )


_PROTOCOL = ("name", "max_num_seqs", "installed", "generate", "install", "stats", "close")
_WIRE_CHARS = 32  # what HELLO can carry


def engine_factory(name: str) -> EngineFactory:
    """The factory that `actors.engine` names. Raises ConfigError with the nearest names."""
    found = resolve(name, ENGINES, setting="actors.engine")
    if name in ENGINES:
        found = import_attribute(found, setting="actors.engine")
    return getattr(found, "from_spec", found)


def build_engine(name: str, spec: EngineSpec) -> Engine:
    """The engine that `actors.engine` names; may take minutes. Raises ConfigError if there is none."""
    if name not in ENGINES:  # a user's own: what it sets on its tokenizer changes no prompt
        spec = replace(spec, tokenizer=copy.deepcopy(spec.tokenizer))
    engine = engine_factory(name)(spec)
    if missing := [attribute for attribute in _PROTOCOL if not hasattr(engine, attribute)]:
        raise ConfigError(
            f"actors.engine={name} returned {type(engine).__name__}, which has no {', '.join(missing)}: "
            "see actors/engines/base.py for what an engine must have"
        )
    return engine


def wire_name(name: str) -> str:
    """The engine's name in HELLO: a user's own engine goes by its attribute alone."""
    return name.rpartition(":")[2][:_WIRE_CHARS]
