"""vLLM's core (start, pause, load, restart, kill), and requests to it in its terms; all of these fail when it dies."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import count
from typing import Any

import numpy as np

from actors.engines.base import GenerateRequest, Generation, VersionSpan
from actors.engines.vllm.imports import check_names, check_output_layer, vllm
from actors.engines.vllm.process import (
    EngineProcessGroup,
    StagedDocument,
    block_interrupts,
    check_argument_names,
    environment,
    starts_alone,
)
from streamrl.config.devices import VLLM_TEMPERATURES, num_vllm_gpus
from streamrl.errors import EngineError, RequestError
from streamrl.messages import VersionRef

log = logging.getLogger("streamrl.actor")

_ALIVE_CHECK_S = 0.5
_STAGED_CHECK_S = 0.02


class Core:
    """Owner of one AsyncLLM at a time, each with the same `arguments` of AsyncEngineArgs and `num_threads` on a CPU.

    `tied` names the copies that documents leave out, each with the name that its values come under; `untied` the
    model's classes, where its output layer is another tensor than its embeddings.
    """

    def __init__(
        self, group: EngineProcessGroup, arguments: Mapping[str, Any], device: str, num_threads: int | None,
        tied: Mapping[str, str], untied: Sequence[str] = (),
    ) -> None:
        self.group, self._arguments, self._tied, self._untied = group, dict(arguments), dict(tied), untied
        self._device, self._num_threads = device, num_threads
        self.llm: Any = None
        self.asleep = False  # from the first to the last step of a sleep
        self.num_bytes_staged = self._seen_bytes = 0  # of all documents, and of the one under way

    @property
    def alive(self) -> bool:
        return self.llm is not None and not self.llm.errored

    def start(self) -> None:
        """Block until vLLM runs, without weights. Raises EngineError if it does not, or does not know an argument."""
        gpus = num_vllm_gpus(self._arguments)
        self.asleep = False
        with self._environment(), block_interrupts(), starts_alone(self._device, gpus):
            self._check()
            try:
                self.llm = vllm().AsyncLLM.from_engine_args(vllm().AsyncEngineArgs(**self._arguments))
            except Exception as error:  # whatever a foreign library raises while it starts
                self.group.terminate_all()
                raise EngineError(f"vLLM {vllm().version} did not start: {error}") from error

    def check(self) -> None:
        """Raise EngineError if vLLM is not installed, or does not know an argument."""
        with self._environment():
            self._check()

    def _check(self) -> None:
        check_names()
        check_argument_names(self._arguments, vllm().AsyncEngineArgs, vllm().version)
        if self._untied:
            check_output_layer(self._untied)

    def _environment(self) -> AbstractContextManager[None]:
        eager = bool(self._arguments.get("enforce_eager"))
        return environment(self.group.mark, self._device, self._num_threads, eager)

    def kill(self) -> None:
        """Kill the core at once: it holds nothing that a graceful shutdown of several seconds would save."""
        llm, self.llm = self.llm, None
        if llm is not None:
            log_level = logging.getLogger("vllm").level
            logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it would report the exit that we cause
            try:
                llm.shutdown(timeout=0.0)
            except Exception as error:  # it is killed whatever it raises
                log.debug("vLLM's shutdown: %r", error)
            finally:
                logging.getLogger("vllm").setLevel(log_level)
        self.group.terminate_all()

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Return when nothing computes. Raises whatever vLLM raises, EngineDeadError among it."""
        if not self.alive:
            raise EngineError("vLLM's core is dead")
        await self.call(self.llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def stage(self, staged: StagedDocument) -> None:
        """Bring a document beside the running model, on every rank; without it, `load` reads it in the pause."""
        await self.call(self.llm.collective_rpc("streamrl_stage", args=(staged.path, staged.entries)))
        while True:
            ranks = await self.call(self.llm.collective_rpc("streamrl_staged"))
            self.num_bytes_staged += max(nbytes for nbytes, _ in ranks) - self._seen_bytes
            self._seen_bytes = max(nbytes for nbytes, _ in ranks)
            if all(done for _, done in ranks):
                self._seen_bytes = 0
                return
            await asyncio.sleep(_STAGED_CHECK_S)

    async def load(self, staged: StagedDocument, ref: VersionRef) -> None:
        """Load a version into a paused core, on every rank; then label, then resume. On any failure it stays paused."""
        if not self.alive:
            raise EngineError("vLLM's core is dead")
        await self.call(self.llm.collective_rpc("streamrl_load", args=(staged.path, staged.entries, self._tied)))
        await self.label_and_resume(ref)

    async def label_and_resume(self, ref: VersionRef) -> None:
        """Label tokens with this version from now on, and resume; a core that slept takes its cache first."""
        await self.call(self.llm.update_weight_version(str(ref)))
        if self.asleep:
            if not await self.call(self.llm.wake_up(tags=["kv_cache"])):
                raise EngineError("vLLM still sleeps with weights and cache awake: install the version of docs/vllm.md")
            self.asleep = False
        await self.call(self.llm.resume_generation())

    async def sleep(self, level: int) -> None:
        """Abort sequences, forget prompts, give cache and weights back; level 1 keeps the weights on the host."""
        if not self.alive:
            raise EngineError("vLLM's core is dead")
        await self.call(self.llm.sleep(level=level, mode="abort"))

    async def wake_weights(self) -> None:
        """Take memory for the weights: after level 1 it holds what it held before, after level 2 anything."""
        if not self.alive:
            raise EngineError("vLLM's core is dead")
        await self.call(self.llm.wake_up(tags=["weights"]))

    async def wake(self, staged: StagedDocument, ref: VersionRef) -> None:
        """Load a version into a core that sleeps, and resume; on any failure it is neither awake nor asleep."""
        await self.wake_weights()
        await self.load(staged, ref)

    async def load_tensors(self, tensors: Mapping[str, Any], ref: VersionRef) -> None:
        with closing(await asyncio.to_thread(StagedDocument, tensors)) as staged:
            await self.load(staged, ref)

    async def call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The core's answer. vLLM never ends a call to a core that died, so its liveness is checked meanwhile."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=_ALIVE_CHECK_S))[0]:
                if not self.alive:
                    raise EngineError("vLLM's core died before it answered")
            return task.result()
        finally:
            task.cancel()

    def close(self) -> None:
        self.kill()
        self.group.close()


NUM_MORE_KEPT = 16
"""Ids asked for beyond top-k: vLLM keeps all that tie with the last, and logits of a half type tie often."""
_WORD = (1 << 64) - 1


class CoreDiedError(EngineError):
    """The request is lost; it may be repeated with another core."""


class RequestTracker:
    """The open requests of the present core; `on_death` is called with an AsyncLLM that turned out to be dead."""

    def __init__(self, core: Core, on_death: Callable[[Any], None]) -> None:
        self.closed = False
        self.prefill_tokens = 0
        self._core, self._on_death = core, on_death
        self._numbers = count()
        self._open: set[asyncio.Task[Any]] = set()

    async def submit(self, prompt_ids: list[int], params: Any, salt: str, lora: Any = None) -> Any:
        """The finished output, of the base or of a LoRARequest. Cancelling aborts the sequence.

        Raises:
            CoreDiedError: also when `cancel_all` was called. EngineError: the engine is closed, or vLLM failed.
            RequestError: vLLM refuses this request.
        """
        # A task of its own, for `cancel_all`.
        request = asyncio.ensure_future(self._run(prompt_ids, params, salt, lora))
        self._open.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            if (caller := asyncio.current_task()) is not None and caller.cancelling():
                raise
            raise self._lost() from None
        finally:
            self._open.discard(request)

    def cancel_all(self) -> None:
        """Cancel all requests before the core is shut down: vLLM would leave them waiting without limit."""
        for request in self._open:
            request.cancel()

    async def _run(self, prompt_ids: list[int], params: Any, salt: str, lora: Any) -> Any:
        llm = self._core.llm
        prompt = vllm().tokens_input(prompt_ids, cache_salt=salt)
        try:
            async for output in llm.generate(
                prompt, params, f"streamrl-{next(self._numbers)}", lora_request=lora
            ):
                if output.finished:
                    if output.outputs[0].finish_reason == "abort":
                        raise EngineError("the engine is closed" if self.closed else "vLLM aborted the sequence")
                    self.prefill_tokens += len(prompt_ids)
                    return output
        except EngineError:
            raise
        except Exception as error:  # of vLLM's own: it is a foreign library
            if llm.errored:
                self._on_death(llm)
                raise self._lost() from error
            if isinstance(error, vllm().refusals):
                raise RequestError(f"vLLM refuses the request: {error}") from error
            raise EngineError(f"vLLM failed: {error!r}") from error
        raise EngineError("vLLM ended a sequence without an output")

    def _lost(self) -> EngineError:
        if self.closed:
            return EngineError("the engine is closed")
        if self._core.asleep:
            return EngineError("the engine's memory was released while this sequence ran")
        return CoreDiedError("vLLM's core died; its sequences are lost, another core is started")


def check_temperature(temperature: float) -> None:
    lowest, highest = VLLM_TEMPERATURES
    if 0 < temperature < lowest or temperature > highest:
        raise RequestError(f"temperature={temperature}: vLLM goes down to {lowest}, up to {highest}, or 0 for greedy")


def sampling_arguments(request: GenerateRequest, eos_ids: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Keyword arguments of SamplingParams. The end-of-sequence ids are ours, so that every engine ends alike.

    Where sets are wanted and ids are cut off, which training does with a top-k, the log-probs of all ids that may be
    left are asked for.
    """
    sampling = request.sampling
    bounded = request.wants_sets and sampling.top_k > 0 and sampling.temperature > 0
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p,
        "top_k": max(sampling.top_k, 0), "max_tokens": request.max_new_tokens, "seed": turn_seed(request),
        "ignore_eos": True, "stop_token_ids": [] if request.ignore_eos else list(eos_ids),
        "stop": list(request.stop), "include_stop_str_in_output": True, "detokenize": bool(request.stop),
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "logprobs": min(sampling.top_k + NUM_MORE_KEPT, vocab_size) if bounded else 0, "flat_logprobs": True,
    }


def scoring_arguments(token_ids: Sequence[int], start: int, temperature: float, context: int) -> dict[str, Any]:
    """Keyword arguments of SamplingParams for log-probs of a prompt alone; vLLM must be left one token to sample."""
    if not 1 <= start <= len(token_ids) < context or temperature != 1.0:
        raise EngineError(
            f"score needs 1 <= start <= tokens < {context} and temperature 1; "
            f"got start={start}, {len(token_ids)} tokens, temperature={temperature}"
        )
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}


def turn_seed(request: GenerateRequest) -> int:
    """Below 2**63. vLLM counts draws from 0 in every request, so the prompt's length must tell turns apart."""
    mixed = (request.seed * 0x9E3779B97F4A7C15 + len(request.prompt_ids) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & _WORD
    return mixed >> 1


def generation_of(output: Any, greedy: bool) -> Generation:
    """A finished CompletionOutput as ours. Raises EngineError if log-probs or version labels are missing or wrong."""
    token_ids, found = list(output.token_ids), output.logprobs
    starts = found.start_indices if found is not None else []
    logprobs = [float(found.logprobs[start]) for start in starts]  # of a place the first: the token that was drawn
    if len(logprobs) != len(token_ids) or not all(map(math.isfinite, logprobs)):
        raise EngineError(f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens, or some are no numbers")
    sets = None
    if token_ids and len(found.logprobs) > len(starts):
        logprobs, sets = _within_sets(found)
    spans = spans_of(output.weight_versions, len(token_ids))
    # Greedy is a distribution of its own, with all its mass on the token taken.
    logprobs = [0.0] * len(token_ids) if greedy else logprobs
    return Generation(token_ids, logprobs, spans, output.finish_reason or "abort", sets)


def _within_sets(found: Any) -> tuple[list[float], list[np.ndarray]]:
    """The drawn tokens' log-probs within the ids that are left, and these ids, ascending, from FlatLogprobs.

    What was cut off has log-prob -inf. Where more ids tie with the last than were asked for, the set is of those that
    came and the drawn one, and log-probs are renormalized over it: the learner scores over the same ids.
    """
    ids, all_logprobs = np.array(found.token_ids), np.array(found.logprobs)
    logprobs, sets = [], []
    for start, end in zip(found.start_indices, found.end_indices, strict=True):
        left = start + (all_logprobs[start:end] > -np.inf).nonzero()[0]
        kept, first = np.unique(ids[left], return_index=True)  # the drawn one comes twice where it is among the others
        sets.append(kept)
        logprobs.append(float(all_logprobs[start] - np.log(np.exp(all_logprobs[left[first]]).sum())))
    return logprobs, sets


def read_older_prompt(output: Any, submitted: VersionRef) -> bool:
    """Tell whether a sequence began with later weights than those that its prompt's cache was salted with.

    It was submitted just before an install, and vLLM, which had stopped by then, began it afterwards.
    """
    spans = spans_of(output.outputs[0].weight_versions, len(output.outputs[0].token_ids))
    return bool(output.num_cached_tokens and spans) and spans[0].ref != submitted


def spans_of(spans: Any, num_tokens: int) -> list[VersionSpan]:
    """vLLM's spans of labels as versions. Raises EngineError for a label that is not ours, or tokens without one."""
    found: list[VersionSpan] = []
    for span in spans or ():
        epoch, _, version = span.version.partition(":")
        if not (epoch.isdecimal() and version.isdecimal()):
            raise EngineError(f"vLLM labeled tokens with {span.version!r}, which is no version")
        if span.end > span.start:
            found.append(VersionSpan(VersionRef(int(epoch), int(version)), span.start, span.end))
    covered = found[-1].end if found else 0
    if covered != num_tokens:
        raise EngineError(f"vLLM's version labels cover {covered} of {num_tokens} tokens")
    return found
