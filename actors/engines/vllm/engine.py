"""vLLM as an actor's engine: AsyncLLM inside the actor's process, its core in a process of its own, no HTTP server.

    actor process                                    engine core and its workers (started, watched, ended by us)
    VllmEngine.generate --token ids--> AsyncLLM ---> scheduler, model           ids, log-probs, spans come back
    VllmEngine.install  --memory it shares---------> DocumentLoader.streamrl_load, between pause and resume

A version is exchanged in five steps: stage the document beside the running model, pause at a forward boundary, load,
set the label that vLLM writes on every token, resume. A load that fails is undone by loading the former document before
anything is generated; an engine that died is started anew, and installs its former version before it generates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from actors.engines.base import INSTALL_POLICIES, EngineSpec, EngineStats, GenerateRequest, Generation, InstallTimes
from actors.engines.native.engine import build_model, end_of_sequence_ids
from actors.engines.native.weight_sets import check_document, checkpoint_tensors
from actors.engines.vllm.client import CoreDied, RequestTracker
from actors.engines.vllm.core import Core
from actors.engines.vllm.imports import vllm
from actors.engines.vllm.process import (
    EngineProcessGroup,
    StagedDocument,
    check_model,
    engine_arguments,
    kv_bytes_per_token,
)
from actors.engines.vllm.requests import (
    check_request,
    check_scoring,
    generation_of,
    sampling_arguments,
    scores_of,
    scoring_arguments,
)
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import VersionRef

log = logging.getLogger("streamrl.actor")

NUM_MAX_DEATHS = 3
"""Deaths of the core without a finished sequence in between, after which the engine gives up."""

REVIVAL_DEADLINE_S = 900.0
"""For starting another core and loading the former version into it; large models take minutes on a GPU."""

_PAUSES = {"continue": ("keep", False), "recompute": ("keep", True), "drain": ("wait", False)}


class VllmEngine:
    """One vLLM engine; arguments as in `EngineSpec`, and:

    Args:
        tokenizer: for its end-of-sequence id only.
        max_num_seqs: sequences that run at once; more wait here, so that none begins with an older version's prompt
            cache.
        arguments: vLLM's own engine arguments, over our defaults.
        eos_ids: tokens that end a sequence; None takes them from the model and the tokenizer.
    Raises:
        EngineError: vLLM is not installed, moved its names, or does not start with these arguments.
    """

    name = "vllm"

    def __init__(
        self, model_dir: str | Path, tokenizer: Any, *, max_num_seqs: int, max_tokens: int,
        device: str = "cpu", dtype: torch.dtype = torch.float32, num_threads: int | None = None,
        install_policy: str = "continue", arguments: Mapping[str, Any] | None = None,
        eos_ids: Collection[int] | None = None,
    ) -> None:
        if install_policy not in INSTALL_POLICIES:
            raise EngineError(f"install_policy={install_policy!r} is unknown: choose one of {INSTALL_POLICIES}")
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self.device, self._policy = device, install_policy
        with torch.device("meta"):
            model = build_model(model_dir, dtype=dtype, device="meta")
        self._expected = {name: tensors[0] for name, tensors in checkpoint_tensors(model).items()}
        self._eos_ids = sorted(end_of_sequence_ids(model, tokenizer) if eos_ids is None else eos_ids)
        config = model.config.get_text_config()
        self._vocab_size: int = config.vocab_size
        # One more than asked for: to score tokens, vLLM must be let sample one that nobody wants.
        self._context = min(max_tokens + 1, getattr(config, "max_position_embeddings", None) or max_tokens + 1)
        self._arguments = engine_arguments(
            max_num_seqs=max_num_seqs, max_tokens=self._context, device=device, dtype=str(dtype).removeprefix("torch."),
            extra=arguments or {}, kv_bytes_per_token=kv_bytes_per_token(config, dtype.itemsize),
        )
        check_model(model.config, device)
        home = EngineProcessGroup(model_dir)
        self._core = Core(home, {**self._arguments, "model": home.folder}, device, num_threads)
        try:
            self._core.start()
        except BaseException:
            self._core.close()
            raise
        self._served: tuple[Mapping[str, Any], VersionRef] | None = None  # what a revived core gets back
        self._exchange = asyncio.Lock()  # an install or a revival
        self._open = asyncio.Event()  # set while sequences may begin
        self._free = asyncio.Semaphore(max_num_seqs)
        self._asking = RequestTracker(self._core, on_death=self._revive_soon)
        self._revival: asyncio.Task[None] | None = None
        self._death: EngineError | None = None
        self._closed = self._draining = self._reviving = self._asleep = False
        self._deaths_in_a_row = 0
        self._running = self._waiting = self._tokens = self._installs = self._revivals = 0
        self._pause_s = self._busy_s = self._busy_since = 0.0

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> VllmEngine:
        return cls(
            spec.model_dir, spec.tokenizer, max_num_seqs=spec.max_num_seqs, max_tokens=spec.max_tokens,
            device=spec.device, dtype=spec.dtype, num_threads=spec.num_threads, install_policy=spec.install_policy,
            arguments=spec.options,
        )

    # --- sequences ----------------------------------------------------------------------------------------------

    @property
    def installed(self) -> VersionRef | None:
        return self._served[1] if self._served is not None else None

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`; waits for weights, for a free slot, and while a version is exchanged."""
        check_request(request, self.max_tokens, self._vocab_size)
        params = vllm().SamplingParams(
            **sampling_arguments(request, self._eos_ids), output_kind=vllm().RequestOutputKind.FINAL_ONLY
        )
        output = await self._submit(list(map(int, request.prompt_ids)), params)
        generation = generation_of(output.outputs[0], greedy=request.sampling.temperature == 0)
        self._tokens += len(generation.token_ids)
        self._deaths_in_a_row = 0
        return generation

    async def score(self, token_ids: list[int], *, start: int, temperature: float) -> list[float]:
        """Log-probs of token_ids[start:] under the installed weights; at temperature 1, which is all vLLM gives.

        It has a place of its own among the sequences. If the core dies meanwhile, its successor is asked, once.

        Raises:
            EngineError: no weights yet, start < 1, another temperature or too many tokens; the core died again.
        """
        if self.installed is None:
            raise EngineError("score needs weights: install a version first")
        check_scoring(token_ids, start, temperature, self._context)
        params = vllm().SamplingParams(**scoring_arguments())
        try:
            output = await self._admit(list(token_ids), params)
        except CoreDied:
            output = await self._admit(list(token_ids), params)
        return scores_of(output.prompt_logprobs, token_ids, start)

    async def _submit(self, prompt_ids: list[int], params: Any) -> Any:
        """The finished output of one request, given to vLLM when a slot is free and no version is being exchanged."""
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._admit(prompt_ids, params)
        finally:
            self._free.release()

    async def _admit(self, prompt_ids: list[int], params: Any) -> Any:
        await self._until_open()
        self._count(+1)
        try:
            return await self._asking.ask(prompt_ids, params, salt=str(self.installed))
        finally:
            self._count(-1)

    async def _until_open(self) -> None:
        """Weights are installed, nothing is being exchanged, and the core lives."""
        while True:
            await self._open.wait()
            if self._death is not None:
                raise self._death
            if self._closed:
                raise EngineError("the engine is closed")
            if self._core.alive:
                return
            self._revive_soon(self._core.llm)

    def _count(self, change: int) -> None:
        now = time.monotonic()
        if self._running:
            self._busy_s += now - self._busy_since
        self._busy_since = now
        self._running += change

    # --- versions -----------------------------------------------------------------------------------------------

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """See `Engine.install`. The document is staged beside the running model; loading stops it.

        Raises:
            WeightsError: the document does not fit, or loading it failed; the old version goes on serving.
            EngineError: the engine is closed or dead, or could not be brought back to the old version.
        """
        began = time.perf_counter()
        check_document(tensors, self._expected)
        async with self._exchange:
            if self._death is not None or self._closed:
                raise self._death or EngineError("the engine is closed")
            staged = await asyncio.to_thread(StagedDocument, tensors)
            try:
                pause_s = await self._replace(staged, ref)
            finally:
                staged.close()
            self._serve(tensors, ref)
        self._pause_s += pause_s
        self._installs += 1
        return InstallTimes(pause_s=pause_s, install_s=time.perf_counter() - began)

    async def _replace(self, staged: StagedDocument, ref: VersionRef) -> float:
        """Pause, load, label, resume; how long sequences stood still.

        Given up halfway it leaves the door closed: only a whole load opens it again.
        """
        self._open.clear()
        mode, clear_cache = _PAUSES[self._policy]
        try:
            self._draining = mode == "wait"
            try:
                await self._core.pause(mode, clear_cache)
            finally:
                self._draining = False
            paused = time.perf_counter()
            await self._core.load(staged, ref)
        except Exception as error:  # of vLLM's or of a loader's making
            await self._go_back(error)
            raise WeightsError(f"vLLM failed to load version {ref}, {self.installed} serves on: {error}") from error
        return time.perf_counter() - paused

    def _serve(self, tensors: Mapping[str, Any], ref: VersionRef) -> None:
        self._served = (tensors, ref)
        self._open.set()

    async def _go_back(self, cause: Exception) -> None:
        """The former document again, in a new core if need be. Without a former one nothing was ever generated."""
        log.warning("the new version could not be loaded, going back to %s: %s", self.installed, cause)
        if self._core.alive and self._served is None:
            return
        try:
            if not self._core.alive:
                raise cause
            await self._core.load_tensors(*self._served)
            self._open.set()
        except Exception:  # mixed beyond repair, or dead: a fresh core holds nothing of the failed version
            await self._revive()

    # --- the core's death ---------------------------------------------------------------------------------------

    def _revive_soon(self, dead: Any) -> None:
        """Start a new core unless that is under way; no sequence begins before it serves the former version."""
        if self._closed or dead is not self._core.llm:
            return
        self._open.clear()
        if self._revival is None or self._revival.done():
            self._revival = asyncio.ensure_future(self._revive_if(dead))

    async def _revive_if(self, dead: Any) -> None:
        async with self._exchange:
            if dead is self._core.llm and not self._closed:
                try:
                    await self._revive()
                except EngineError as error:
                    log.error("%s", error)

    async def _revive(self) -> None:
        """A new core with the former version, if there was one.

        Raises:
            EngineError: that failed, or it dies again and again; the engine is dead from now on.
        """
        self._open.clear()
        self._deaths_in_a_row += 1
        self._reviving = True
        self._asking.cancel_all()
        try:
            if self._deaths_in_a_row > NUM_MAX_DEATHS:
                raise EngineError(f"vLLM's core died {self._deaths_in_a_row} times without finishing a sequence")
            log.warning("vLLM's core is gone: starting another, version %s comes first", self.installed)
            async with asyncio.timeout(REVIVAL_DEADLINE_S):
                await self._core.restart()
                self._revivals += 1
                if self._served is not None:
                    await self._core.load_tensors(*self._served)
                    self._open.set()
        except Exception as error:
            self._death = error if isinstance(error, EngineError) else EngineError(f"vLLM cannot be revived: {error!r}")
            self._open.set()  # those who wait shall hear of it
            raise self._death from error
        finally:
            self._reviving = self._asleep = False

    # --- the rest -----------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1) -> None:
        """Give the device's memory to others: level 1 moves the weights to the host, 2 forgets them too.

        Raises:
            EngineError: on a CPU, or without actors.vllm.enable_sleep_mode=true.
        """
        self._check_sleep()
        async with self._exchange:
            self._open.clear()
            await self._core.llm.sleep(level)
            self._asleep = True

    async def wake(self, tags: list[str] | None = None) -> None:
        """Take the memory back; after level 2 install a version before anything is generated."""
        self._check_sleep()
        async with self._exchange:
            if await self._core.llm.wake_up(tags):
                self._asleep = False
                self._open.set()

    def _check_sleep(self) -> None:
        if self.device == "cpu":
            raise EngineError("vLLM cannot sleep on a CPU: there is no device memory to give back; end the actor")
        if not self._arguments.get("enable_sleep_mode"):
            raise EngineError("sleeping needs actors.vllm.enable_sleep_mode=true when the engine starts")

    @property
    def _held_up(self) -> bool:
        """Draining ends with the sequences that the actor waits for, and it gives up those that do not move."""
        return self._reviving or self._asleep or (self._draining and self._running > 0)

    def stats(self) -> EngineStats:
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)
        return EngineStats(
            tokens_total=self._tokens, prefill_tokens_total=self._asking.prefill_tokens, running=self._running,
            waiting=self._waiting, busy_s=busy_s, blocked=self._held_up,
            extra={
                "dead": float(self._death is not None), "installs": float(self._installs), "pause_s": self._pause_s,
                "revivals": float(self._revivals),
            },
        )

    async def close(self) -> None:
        """End the core and everything it started; whoever still waits gets an EngineError."""
        self._closed = self._asking.closed = True
        self._open.set()
        self._asking.cancel_all()
        if self._revival is not None:
            self._revival.cancel()
        await asyncio.to_thread(self._core.close)
