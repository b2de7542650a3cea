"""vLLM's core: start, pause, load, restart, kill. It knows no requests and no policy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any

from actors.engines.vllm.gpu import num_engine_gpus, starts_alone
from actors.engines.vllm.imports import check_names, vllm
from actors.engines.vllm.process import (
    EngineProcessGroup,
    StagedDocument,
    block_interrupts,
    check_argument_names,
    environment,
)
from streamrl.errors import EngineError
from streamrl.messages import VersionRef

log = logging.getLogger("streamrl.actor")

_ALIVE_CHECK_S = 0.5
_STAGED_CHECK_S = 0.02


class Core:
    """Owner of one AsyncLLM at a time, each with the same `arguments` of AsyncEngineArgs and `num_threads` on a CPU.

    `tied` names the copies that documents leave out, each with the name that its values come under.
    """

    def __init__(
        self, group: EngineProcessGroup, arguments: Mapping[str, Any], device: str, num_threads: int | None,
        tied: Mapping[str, str],
    ) -> None:
        self.group, self._arguments, self._tied = group, dict(arguments), dict(tied)
        self._device, self._num_threads = device, num_threads
        self.llm: Any = None
        self.num_bytes_staged = self._seen_bytes = 0  # of all documents, and of the one under way

    @property
    def alive(self) -> bool:
        return self.llm is not None and not self.llm.errored

    def start(self) -> None:
        """Block until vLLM runs, without weights. Raises EngineError if it does not, or does not know an argument."""
        gpus = num_engine_gpus(self._arguments)
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

    def _environment(self) -> AbstractContextManager[None]:
        eager = bool(self._arguments.get("enforce_eager"))
        return environment(self.group.mark, self._device, self._num_threads, eager)

    def kill(self) -> None:
        """At once: a core holds nothing that a graceful shutdown of several seconds would save."""
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
        """Label tokens with this version from now on, and resume generation."""
        await self.call(self.llm.update_weight_version(str(ref)))
        await self.call(self.llm.resume_generation())

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
