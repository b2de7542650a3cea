"""vLLM as an actor's engine: AsyncLLM inside the actor's process, its core in a process of its own, no HTTP server.

    actor process                                    engine core and its workers (started, watched, killed by us)
    VllmEngine.generate --token ids--> AsyncLLM ---> scheduler, model           ids, log-probs, spans come back
    VllmEngine.install  --shared memory------------> DocumentLoader: streamrl_stage beside the running model, then
                                                     streamrl_load between pause and resume

A version is exchanged in five steps: stage the document beside the running model, pause at a forward boundary, load,
set the label that vLLM writes on every token, resume. A load that fails is undone by loading the former document before
anything is generated; a core that died is restarted, and gets the former version before it generates.

In a run by turns vLLM sleeps in between, and the next version wakes it: memory for weights, load, label, memory for the
cache. A wake that fails has nothing to go back to: the engine is dead, and its actor restarts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from contextlib import closing
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from actors.engines.base import EngineSpec, EngineStats, GenerateRequest, Generation, InstallTimes, check_request
from actors.engines.native.engine import build_model, check_sizes, model_end_ids
from actors.engines.native.weights import check_document, checkpoint_tensors
from actors.engines.vllm.core import (
    Core,
    CoreDiedError,
    RequestTracker,
    check_temperature,
    generation_of,
    read_older_prompt,
    sampling_arguments,
    scoring_arguments,
)
from actors.engines.vllm.imports import vllm
from actors.engines.vllm.process import (
    EngineProcessGroup,
    StagedDocument,
    check_model,
    engine_arguments,
    gpu_arguments,
    kv_bytes_per_token,
    lasting_folder,
)
from streamrl.architectures.rope import original_length
from streamrl.errors import EngineError, RequestError, WeightsError
from streamrl.gpus import gpu_of
from streamrl.messages import VersionRef

log = logging.getLogger("streamrl.actor")

NUM_MAX_DEATHS = 3
"""Deaths of the core without a finished sequence in between, after which the engine gives up."""

RESTART_DEADLINE_S = 900.0
"""For starting another core and loading the former version into it; large models take minutes on a GPU."""

PAUSES = {"continue": ("keep", False), "recompute": ("keep", True), "drain": ("wait", False)}


class VllmEngine:
    """One vLLM engine; `spec.options` are vLLM's own engine arguments, over our defaults.

    Of more than max_num_seqs sequences the rest wait here, so that none begins with an older version's prompt cache.

    Raises:
        EngineError: vLLM is not installed, moved its names, or does not start with these arguments.
    """

    name, returns_sets = "vllm", True
    sleep_level = 2
    """vLLM's level: weights are dropped, because a newer version wakes it."""

    def __init__(self, spec: EngineSpec) -> None:
        self.max_num_seqs, self.max_tokens, self._policy = spec.max_num_seqs, spec.max_tokens, spec.install_policy
        with torch.device("meta"):
            model = build_model(spec.model_dir, dtype=spec.dtype, device="meta")
        check_sizes(model, spec.max_num_seqs, spec.max_tokens)  # vLLM would cut answers short without a word
        self._model = model  # without weights
        self._expected = checkpoint_tensors(model)
        self._eos_ids = sorted(model_end_ids(model, spec.tokenizer))
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        # One more than asked for: to score tokens, vLLM must be allowed to sample one, which is thrown away.
        longest = spec.max_tokens + 1
        self._context = min(longest, getattr(config, "max_position_embeddings", None) or longest)
        if spec.max_tokens == original_length(config):
            self._context = spec.max_tokens  # one token more would change the rotary frequencies of every sequence
        arguments = engine_arguments(
            max_num_seqs=spec.max_num_seqs, max_tokens=self._context, device=spec.device,
            dtype=str(spec.dtype).removeprefix("torch."), extra=spec.options,
            kv_bytes_per_token=kv_bytes_per_token(config, spec.dtype.itemsize),
        )
        check_model(model.config, spec.device)
        if spec.device != "cpu":
            nbytes = sum(tensor.numel() for tensor in self._expected.values()) * spec.dtype.itemsize
            arguments |= {**gpu_arguments(
                spec.device, spec.options, half=spec.dtype.itemsize == 2, document_nbytes=nbytes,
                num_documents=spec.num_device_documents, share=spec.memory_share, gpu=gpu_of(spec.device),
                sleeps=spec.takes_turns,
            )}
        group = EngineProcessGroup(spec.model_dir)
        arguments |= {
            **self._more_arguments(), "model": self._model_folder(group, arguments), "max_logprobs": self.vocab_size,
        }
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        untied = () if shared else tuple(model.config.architectures)
        self._core = Core(group, arguments, spec.device, spec.num_threads, tied, untied)
        self._start_empty()
        self._served: tuple[Mapping[str, Any], VersionRef] | None = None  # what a restarted core gets back
        self._exchange = asyncio.Lock()  # an install or a restart
        self._open = asyncio.Event()  # set while sequences may begin
        self._free = asyncio.Semaphore(spec.max_num_seqs)
        self._requests = RequestTracker(self._core, on_death=self._restart_soon)
        self._restart_task: asyncio.Task[None] | None = None
        self._death: EngineError | None = None
        self._closed = self._draining = self._restarting = False
        self._deaths_in_a_row = 0
        self._running = self._waiting = self._tokens = self._installs = self._restarts = self._releases = 0
        self._pause_s = self._busy_s = self._busy_since = 0.0

    def _model_folder(self, group: EngineProcessGroup, arguments: Mapping[str, Any]) -> str:
        """The folder that vLLM reads the model's files from; a lasting one where vLLM compiles."""
        return group.folder if arguments.get("enforce_eager") else lasting_folder(group.folder)

    def _more_arguments(self) -> dict[str, Any]:
        """Engine arguments over all others."""
        return {}

    def _start_empty(self) -> None:
        """Start without weights, so that wrong arguments are found before a version is fetched."""
        try:
            self._core.start()
        except BaseException:
            self._core.close()
            raise

    # --- sequences ----------------------------------------------------------------------------------------------

    @property
    def installed(self) -> VersionRef | None:
        return self._served[1] if self._served is not None else None

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`; waits for weights, for a free place, and while a version is exchanged."""
        return await self._generate(request)

    async def _generate(self, request: GenerateRequest, version: VersionRef | None = None) -> Generation:
        """Generate with this version's adapter, if there are adapters; None takes the newest."""
        check_temperature(request.sampling.temperature)
        check_request(request, self.max_tokens, self.vocab_size)
        try:
            params = vllm().SamplingParams(
                **sampling_arguments(request, self._eos_ids, self.vocab_size),
                output_kind=vllm().RequestOutputKind.FINAL_ONLY,
            )
        except vllm().refusals as error:
            raise RequestError(f"vLLM refuses the request: {error}") from error
        self._waiting += 1
        releases = self._releases
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            self._check_kept(releases)
            output = await self._submit(list(map(int, request.prompt_ids)), params, version)
        finally:
            self._free.release()
        generation = generation_of(output.outputs[0], greedy=request.sampling.temperature == 0)
        self._tokens += len(generation.token_ids)
        self._deaths_in_a_row = 0
        return generation

    async def score(self, token_ids: list[int], *, start: int, temperature: float) -> list[float]:
        """See `ScoresTokens.score`; at temperature 1 only. A request lost with the core is repeated once.

        It does not wait for a place: vLLM has one sequence more than `generate` uses.
        """
        if self.installed is None:
            raise EngineError("score needs weights: install a version first")
        params = vllm().SamplingParams(**scoring_arguments(token_ids, start, temperature, self._context))
        try:
            output = await self._submit(list(token_ids), params)
        except CoreDiedError:
            output = await self._submit(list(token_ids), params)
        rows = output.prompt_logprobs
        return [float(rows[place][token_ids[place]].logprob) for place in range(start, len(token_ids))]

    async def _submit(self, prompt_ids: list[int], params: Any, version: VersionRef | None = None) -> Any:
        """The finished output, of a request that begins when no version is being exchanged.

        One that an install overtook is repeated: it may have read its prompt from the cache of the older version.
        """
        while True:
            await self._until_open()
            salt = version or self.installed
            self._count(+1)
            try:
                output = await self._requests.submit(prompt_ids, params, salt=str(salt), lora=self._lora_of(version))
            finally:
                self._count(-1)
            if version is not None or params.prompt_logprobs is not None or not read_older_prompt(output, salt):
                return output

    def _lora_of(self, version: VersionRef | None) -> Any:
        """The LoRARequest of a version; None where versions are whole models."""
        return None

    async def _until_open(self) -> None:
        """Wait until weights are installed, nothing is being exchanged, and the core lives."""
        releases = self._releases
        while True:
            await self._open.wait()
            self._check_kept(releases)
            if self._death is not None:
                raise self._death
            if self._closed:
                raise EngineError("the engine is closed")
            if self._core.alive:
                return
            self._restart_soon(self._core.llm)

    def _check_kept(self, releases: int) -> None:
        if self._releases != releases:
            raise EngineError("the engine's memory was released while this sequence waited: try again later")

    def _count(self, change: int) -> None:
        now = time.monotonic()
        if self._running:
            self._busy_s += now - self._busy_since
        self._busy_since = now
        self._running += change

    # --- versions -----------------------------------------------------------------------------------------------

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """See `Engine.install`. A failed load is undone: WeightsError; EngineError if the engine is dead now."""
        began = time.perf_counter()
        check_document(tensors, self._expected)
        async with self._exchange:
            self._check_works()
            tensors = await asyncio.to_thread(as_in_files, self._model, tensors)
            with closing(await asyncio.to_thread(StagedDocument, tensors)) as staged:
                if self._core.asleep:
                    pause_s = await self._wake(self._core.wake(staged, ref))
                else:
                    await self._stage(staged)
                    pause_s = await self._replace(staged, ref)
            self._served = (tensors, ref)
            self._open.set()
        self._pause_s += pause_s
        self._installs += 1
        return InstallTimes(pause_s=pause_s, install_s=time.perf_counter() - began)

    async def _stage(self, staged: StagedDocument) -> None:
        """Stage the document on the model's device while sequences run; a failure here is met again by the load."""
        try:
            if self._core.alive:
                await self._core.stage(staged)
        except Exception as error:  # of vLLM's making
            log.warning("a version could not be staged, and is read in the pause: %r", error)

    async def _replace(self, staged: StagedDocument, ref: VersionRef) -> float:
        """Pause, load, label, resume; how long sequences stood still. Only a complete load admits sequences again."""
        self._open.clear()
        mode, clear_cache = PAUSES[self._policy]
        try:
            self._draining = mode == "wait"
            try:
                await self._core.pause(mode, clear_cache)
            finally:
                self._draining = False
            paused = time.perf_counter()
            await self._core.load(staged, ref)
        except Exception as error:  # of vLLM's or of a loader's making
            await self._roll_back(error)
            raise WeightsError(f"vLLM failed to load version {ref}, {self.installed} keeps serving: {error}") from error
        return time.perf_counter() - paused

    async def _roll_back(self, cause: Exception) -> None:
        """Load the former document, in a new core if need be. Without a former one nothing was ever generated."""
        log.warning("the new version could not be loaded, going back to %s: %s", self.installed, cause)
        if self._core.alive and self._served is None:
            return
        try:
            if not self._core.alive:
                raise cause
            await self._core.load_tensors(*self._served)
            self._open.set()
        except Exception:  # the model is mixed or the core dead: a new one holds nothing of the failed version
            await self._restart()

    # --- sleep --------------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """See `GivesMemoryBack.release`."""
        async with self._exchange:
            self._check_works()
            if self._core.llm is None:
                return  # it waits for a base
            self._served = None
            self._releases += 1
            self._open.set()  # those that wait see that they are too late
            self._open.clear()
            self._core.asleep = True
            self._requests.cancel_all()
            try:
                await self._core.sleep(self.sleep_level)
            except Exception as error:  # of vLLM's making
                raise self._dies(f"vLLM did not give its memory back: {error}") from error

    async def _wake(self, steps: Awaitable[None]) -> float:
        """Do steps of waking the core; how long that took."""
        began = time.perf_counter()
        try:
            await steps
        except Exception as error:  # of vLLM's or of a loader's making
            raise self._dies(f"vLLM did not wake up: {error}") from error
        return time.perf_counter() - began

    def _dies(self, why: str) -> EngineError:
        self._death = EngineError(f"{why}. Restart this actor; if memory was short, lower actors.gpu_memory_share")
        self._open.set()  # waiting requests get the error
        return self._death

    def _check_works(self) -> None:
        if self._death is not None or self._closed:
            raise self._death or EngineError("the engine is closed")

    # --- restart of the core ------------------------------------------------------------------------------------

    def _restart_soon(self, dead: Any) -> None:
        """Start a new core unless that is under way; no sequence begins before it serves the former version."""
        if self._closed or dead is not self._core.llm:
            return
        self._open.clear()
        if self._restart_task is None or self._restart_task.done():
            self._restart_task = asyncio.ensure_future(self._restart_if(dead))

    async def _restart_if(self, dead: Any) -> None:
        async with self._exchange:
            if dead is self._core.llm and not self._closed:
                try:
                    await self._restart()
                except EngineError as error:
                    log.error("%s", error)

    async def _restart(self) -> None:
        """A new core with the former version, if any. Raises EngineError: the engine is dead from then on."""
        self._open.clear()
        self._deaths_in_a_row += 1
        self._restarting = True
        self._requests.cancel_all()
        try:
            if self._deaths_in_a_row > NUM_MAX_DEATHS:
                raise EngineError(f"vLLM's core died {self._deaths_in_a_row} times without finishing a sequence")
            log.warning("vLLM's core died: starting another, version %s comes first", self.installed)
            async with asyncio.timeout(RESTART_DEADLINE_S):
                await asyncio.to_thread(self._core.kill)
                await asyncio.to_thread(self._core.start)
                self._restarts += 1
                await self._load_former()
        except Exception as error:
            known = isinstance(error, EngineError)
            self._death = error if known else EngineError(f"vLLM cannot be restarted: {error!r}")
            self._open.set()  # waiting requests get the error
            raise self._death from error
        finally:
            self._restarting = False

    async def _load_former(self) -> None:
        """The version that served, into a core that was started again."""
        if self._served is not None:
            await self._core.load_tensors(*self._served)
            self._open.set()

    # --- the rest -----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)
        return EngineStats(
            tokens_total=self._tokens, prefill_tokens_total=self._requests.prefill_tokens, running=self._running,
            waiting=self._waiting, busy_s=busy_s,
            # A drain ends with the sequences that the actor waits for, and it hands back those that do not move.
            blocked=self._restarting or (self._draining and self._running > 0),
            extra={
                "dead": float(self._death is not None), "installs": float(self._installs), "pause_s": self._pause_s,
                "restarts": float(self._restarts), "staged_bytes": float(self._core.num_bytes_staged),
            },
        )

    async def close(self) -> None:
        """End the core and every process it started; waiting requests get an EngineError."""
        self._closed = self._requests.closed = True
        self._open.set()
        self._requests.cancel_all()
        if self._restart_task is not None:
            self._restart_task.cancel()
        await asyncio.to_thread(self._core.close)


def as_in_files(model: torch.nn.Module, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors as the model's files name them, which vLLM reads: transformers fuses the experts of a mixture."""
    found = revert_weight_conversion(model, dict(tensors))
    return tensors if found.keys() == tensors.keys() else found
