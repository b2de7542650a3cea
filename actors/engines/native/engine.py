"""The native engine: any causal language model of transformers, continuous batching, one thread of its own.

The asyncio side posts work and awaits futures; everything that touches the model runs on the engine's thread, so
"between two forward passes" is "between two calls of `Scheduler.step`".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from actors.engines.base import (
    AdapterSpec,
    EngineSpec,
    EngineStats,
    GenerateRequest,
    Generation,
    InstallTimes,
    check_request,
    end_of_sequence_ids,
)
from actors.engines.native.forward import ATTENTION_NAME, Forward
from actors.engines.native.graphs import Capture
from actors.engines.native.lean import Ready
from actors.engines.native.scheduler import Scheduler, Sequence, StopMatcher, decoder
from actors.engines.native.self_check import prepare
from actors.engines.native.weights import AdapterSets, Staged, WeightSets, linear_weights
from streamrl.architectures.saved_buffers import keep_buffers_wide
from streamrl.errors import EngineError, RequestError
from streamrl.messages import VersionRef
from streamrl.process_memory import keep_freed_memory, return_freed_memory

Answer = asyncio.Future[Any]
_Staged = tuple[Staged, Ready | None]


class Answers:
    """Collected during a turn of the engine's thread, then handed over at once: each waking of a loop is expensive."""

    def __init__(self) -> None:
        self._ready: list[tuple[Answer, Any]] = []

    def put(self, answer: Answer, outcome: Any) -> None:
        """Answer with the next `flush`; an exception is raised in the caller."""
        self._ready.append((answer, outcome))

    def flush(self) -> None:
        """Wake the callers of everything that was put."""
        if not self._ready:
            return
        ready, self._ready = self._ready, []
        with contextlib.suppress(RuntimeError):  # the loop is closed: none is awaited
            ready[0][0].get_loop().call_soon_threadsafe(_settle, ready)


def _settle(ready: list[tuple[Answer, Any]]) -> None:
    for answer, outcome in ready:
        if answer.done():  # cancelled by its caller
            continue
        if isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


log = logging.getLogger("streamrl.actor")

CLOSE_DEADLINE_S = 10.0
"""For the pass that runs when the engine is closed."""


def build_model(model_dir: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> torch.nn.Module:
    """A causal language model from its configuration alone, with random weights; no code from the folder is run.

    They are drawn on a GPU where that is the device: a CPU needs minutes for a large model. On the meta device there
    are none.
    """
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    with torch.device(device) if torch.device(device).type != "cpu" else nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).to(device)
    keep_buffers_wide(model)
    if (Path(model_dir) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    return model


def model_end_ids(model: torch.nn.Module, tokenizer: Any) -> frozenset[int]:
    """The tokens at which an engine of this model ends a sequence."""
    return end_of_sequence_ids(model.config.get_text_config(), getattr(model, "generation_config", None), tokenizer)


class NativeEngine:
    """One model, `max_num_seqs` sequences at a time; arguments as in `EngineSpec`, and:

    Args:
        model: a transformers causal LM (see `build_model`); the engine owns it from here on.
        tokenizer: only for stop strings and its end-of-sequence id; None if neither is needed.
        prefill_tokens: prompt tokens that one forward pass reads at most (a longer prompt is read whole).
        adapter, weights: as in `EngineSpec`.
        capture: see `Forward`.
    """

    name, returns_sets = "native", True

    def __init__(
        self, model: torch.nn.Module, tokenizer: Any, *, max_num_seqs: int, max_tokens: int,
        device: torch.device | str = "cpu", num_threads: int | None = None, install_policy: str = "continue",
        prefill_tokens: int = 2048, adapter: AdapterSpec | None = None, weights: str = "full",
        capture: Capture | None = None,
    ) -> None:
        check_sizes(model, max_num_seqs, max_tokens)
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self._policy, self._num_threads = install_policy, num_threads
        self._eos_ids = model_end_ids(model, tokenizer)
        self._decode = decoder(tokenizer) if tokenizer is not None else None
        prepare(model, max_tokens)
        model.requires_grad_(False).to(device).set_attn_implementation(ATTENTION_NAME)
        self.rounds_weights = weights == "int8"
        rounded = linear_weights(model) if self.rounds_weights else ()
        self._adapters = AdapterSets(model, adapter) if adapter is not None else None
        forward = Forward(
            model,
            max_num_seqs,
            max_tokens,
            self._adapters,
            int8=self.rounds_weights,
            capture=capture,
        )
        self._weights = WeightSets(model, rounded)  # after the lean pass has laid matrices below each other
        self._scheduler = Scheduler(
            forward, max_num_seqs, prefill_tokens,
            pinning=self._adapters is not None and install_policy == "drain",
        )

        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()  # work for the engine's thread, done between two steps
        self._swaps: deque[Callable[[], None]] = deque()  # installs; under "drain" they wait for the batch to end
        self._open: set[Answer] = set()  # those that are still awaited
        self._answers = Answers()
        self._closing = False
        self._death: BaseException | None = None
        self._busy_s = self._pause_s = 0.0
        self._installs = 0
        self._installing = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> NativeEngine:
        if spec.device == "cpu":
            keep_freed_memory()
        elif spec.memory_share is not None:
            index = torch.device(spec.device).index or 0  # torch refuses a device without a number here
            torch.cuda.set_per_process_memory_fraction(spec.memory_share, index)
        model = build_model(spec.model_dir, dtype=spec.dtype, device=spec.device)
        return cls(
            model, spec.tokenizer, max_num_seqs=spec.max_num_seqs, max_tokens=spec.max_tokens, device=spec.device,
            num_threads=spec.num_threads, install_policy=spec.install_policy, adapter=spec.adapter,
            weights=spec.weights,
        )

    # --- the asyncio side --------------------------------------------------------------------------------------

    @property
    def installed(self) -> VersionRef | None:
        return self._scheduler.ref

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding, which may be padded beyond the tokenizer's length."""
        return self._scheduler.forward.vocab_size

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`; waits while no weights are installed yet."""
        check_request(request, self.max_tokens, self.vocab_size)
        if request.stop and self._decode is None:
            raise RequestError("stop strings need a tokenizer, and this engine was built without one")
        answer: Answer = asyncio.get_running_loop().create_future()
        matcher = StopMatcher(request.stop, self._decode) if request.stop else None
        eos_ids = frozenset() if request.ignore_eos else self._eos_ids
        prompt = tuple(map(int, request.prompt_ids))
        sequence = Sequence(request, prompt, lambda outcome: self._answers.put(answer, outcome), eos_ids, matcher)
        try:
            return await self._post(lambda: self._scheduler.waiting.append(sequence), self._inbox, answer)
        except asyncio.CancelledError:
            with self._wake:
                self._inbox.append(lambda: self._scheduler.abort(sequence))
                self._wake.notify()
            raise

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """See `Engine.install`. The copy is made beside the running model; only the pointer swap stops it."""
        return await self._install(self._stage, tensors, self._exchange, ref)

    async def _install(
        self, stage: Callable[[Any], Any], tensors: Mapping[str, Any], exchange: Callable[[Any], None], ref: VersionRef
    ) -> InstallTimes:
        begin = time.perf_counter()
        async with self._installing:
            staged = await asyncio.to_thread(stage, tensors)
            pause_s = await self._on_thread(lambda: self._swap(lambda: exchange(staged), ref), self._swaps)
        return InstallTimes(pause_s=pause_s, install_s=time.perf_counter() - begin)

    def _stage(self, tensors: Mapping[str, Any]) -> _Staged:
        staged = self._weights.stage(tensors)
        lean = self._scheduler.forward.lean
        if lean is None:
            return staged, None
        return staged, lean.ready(staged)

    def _exchange(self, staged: _Staged, *, keep_spare: bool = True) -> None:
        whole, ready = staged
        self._weights.swap(whole, keep_spare=keep_spare)
        if ready is not None:
            lean = self._scheduler.forward.lean
            lean.use(ready)

    async def install_base(self, tensors: Mapping[str, Any]) -> None:
        """See `TakesAdapters.install_base`."""
        async with self._installing:
            staged = await asyncio.to_thread(self._stage, tensors)
            await self._on_thread(lambda: self._exchange(staged, keep_spare=False), self._inbox)

    async def install_adapter(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """See `TakesAdapters.install_adapter`."""
        if (adapters := self._adapters) is None:
            raise EngineError("this engine was built for whole models: set EngineSpec.adapter to what versions are")
        return await self._install(
            adapters.stage, tensors, lambda staged: adapters.add(ref, staged, self._scheduler.versions_in_use), ref
        )

    async def score(self, token_ids: list[int], *, start: int, temperature: float) -> list[float]:
        """See `ScoresTokens.score`: one direct pass without the cache."""
        if self.installed is None:
            raise EngineError("score needs weights: install a version first")
        if not 1 <= start <= len(token_ids) <= self.max_tokens or temperature <= 0.0:
            raise EngineError(
                f"score needs 1 <= start <= tokens <= {self.max_tokens} and temperature > 0; "
                f"got start={start}, {len(token_ids)} tokens, temperature={temperature}"
            )
        ids = list(token_ids)
        scheduler = self._scheduler
        return await self._on_thread(
            lambda: scheduler.forward.score(ids, start, temperature, scheduler.ref), self._inbox
        )

    async def release(self) -> None:
        """See `GivesMemoryBack.release`."""
        async with self._installing:
            await self._on_thread(self._release, self._inbox)

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """See `ExposesWeights.live_tensors`."""
        return self._weights.live if self._adapters is None else {**self._weights.live, **self._adapters.live}

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            tokens_total=scheduler.tokens_total, prefill_tokens_total=scheduler.prefill_tokens_total,
            steps_total=scheduler.steps_total, running=len(scheduler.running), waiting=len(scheduler.waiting),
            busy_s=self._busy_s,
            extra={
                "dead": float(self._death is not None), "installs": float(self._installs), "pause_s": self._pause_s,
                "nonfinite": float(scheduler.nonfinite_total),
                "kv_cache_bytes": float(scheduler.forward.cache.nbytes),
            },
        )

    async def close(self) -> None:
        """End the thread; open requests get an EngineError. A thread that hangs in a pass is left behind."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            log.error("the engine hangs in a forward pass: its thread is left to the end of the process")

    async def _post(self, work: Callable[[], None], queue: deque[Callable[[], None]], answer: Answer) -> Any:
        """Hand work to the engine's thread and wait for its answer."""
        with self._wake:
            if self._closing or self._death is not None:
                raise self._ended()
            queue.append(work)
            self._open.add(answer)
            self._wake.notify()
        try:
            return await answer
        finally:
            with self._wake:
                self._open.discard(answer)
                # Cancelled before its turn: an install without a caller must not happen later.
                if work in queue:
                    queue.remove(work)

    async def _on_thread(self, work: Callable[[], Any], queue: deque[Callable[[], None]]) -> Any:
        """Run `work` between two steps; returns its result or raises its error."""
        answer: Answer = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                self._scheduler.catch_up()
                self._answers.put(answer, work())
            except EngineError as error:
                self._answers.put(answer, error)

        return await self._post(run, queue, answer)

    # --- the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except Exception as error:
            # Model code and device errors end up here; every open request fails with them.
            self._death = error
        with self._wake:
            self._closing = True
            unanswered = list(self._open)
        self._scheduler.clear()
        for answer in unanswered:
            self._answers.put(answer, self._ended())
        self._answers.flush()

    def _turn(self) -> bool:
        """Do the posted work, then one forward pass. False once the engine is closing."""
        scheduler = self._scheduler
        with self._wake:
            while not (self._closing or self._inbox or self._swaps or scheduler.has_work):
                self._wake.wait()
            work = list(self._inbox)
            self._inbox.clear()
        begin = time.perf_counter()
        for item in work:
            item()
        if self._closing:
            return False
        while (swap := self._next_swap()) is not None:
            swap()
        self._answers.flush()  # an install does not wait for the pass that follows
        if scheduler.has_work:
            scheduler.step()
            self._answers.flush()
        self._busy_s += time.perf_counter() - begin
        return True

    def _next_swap(self) -> Callable[[], None] | None:
        """The install that may happen now; under "drain" one that must wait stops the admission of sequences."""
        with self._wake:
            drains = self._policy == "drain" and self._adapters is None  # there is room for several adapters
            swap = self._swaps.popleft() if self._swaps and not (drains and self._scheduler.running) else None
            self._scheduler.admitting = not (self._swaps and drains)
        return swap

    def _swap(self, exchange: Callable[[], None], ref: VersionRef) -> float:
        begin = time.perf_counter()
        exchange()
        self._scheduler.forward.cache.allocate()
        self._scheduler.new_version(ref, recompute=self._policy == "recompute")
        pause_s = time.perf_counter() - begin
        self._pause_s += pause_s
        self._installs += 1
        return pause_s

    def _release(self) -> None:
        scheduler = self._scheduler
        forward = scheduler.forward
        for sequence in (*scheduler.running, *scheduler.waiting):
            scheduler.abort(sequence)
            sequence.deliver(EngineError("the engine's memory was released while this sequence ran"))
        scheduler.ref = None
        forward.cache.release()
        if forward.graphs is not None:
            forward.graphs.clear()
        if forward.lean is not None:
            forward.lean.use(None)
        self._weights.release()
        if self._adapters is not None:
            self._adapters.release()
        if forward.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()

    def _ended(self) -> EngineError:
        if self._death is None:
            return EngineError("the engine is closed")
        error = EngineError(f"the engine died: {type(self._death).__name__}: {self._death}")
        error.__cause__ = self._death
        return error


def check_sizes(model: torch.nn.Module, max_num_seqs: int, max_tokens: int) -> None:
    """Raise EngineError for sequences that are longer than the model's positions, and for no room at all."""
    if max_num_seqs < 1 or max_tokens < 2:
        raise EngineError(f"an engine needs max_num_seqs >= 1, max_tokens >= 2, got {max_num_seqs} and {max_tokens}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_tokens > limit:
        raise EngineError(
            f"max_tokens={max_tokens} exceeds the model's max_position_embeddings={limit}: lower "
            "rollout.max_prompt_tokens, or max_new_tokens of rollout.train.sampling and rollout.test.sampling"
        )
