"""vLLM's core and the processes around it: start, exchange weights, bury. It knows no requests and no policy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from actors.engines.vllm.imports import check_names, vllm
from actors.engines.vllm.process import (
    EngineProcessGroup,
    StagedDocument,
    check_argument_names,
    environment,
    interrupts_held_back,
)
from streamrl.errors import EngineError
from streamrl.messages import VersionRef

log = logging.getLogger("streamrl.actor")

_LOOK_S = 0.5


class Core:
    """One AsyncLLM at a time; the next one is started with the same arguments.

    Args:
        home: where the model's files are, and what keeps the processes together.
        arguments: of AsyncEngineArgs.
        num_threads: of the workers on a CPU; None leaves vLLM's choice.
    """

    def __init__(
        self, home: EngineProcessGroup, arguments: Mapping[str, Any], device: str, num_threads: int | None
    ) -> None:
        self._home, self._arguments = home, dict(arguments)
        self._device, self._num_threads = device, num_threads
        self.llm: Any = None

    @property
    def alive(self) -> bool:
        return self.llm is not None and not self.llm.errored

    def start(self) -> None:
        """Blocks for as long as vLLM starts (seconds on a CPU).

        Raises:
            EngineError: it does not start, or does not know an argument.
        """
        eager = bool(self._arguments.get("enforce_eager"))
        with environment(self._home.mark, self._device, self._num_threads, eager), interrupts_held_back():
            check_names()
            check_argument_names(self._arguments, vllm().AsyncEngineArgs, vllm().version)
            try:
                self.llm = vllm().AsyncLLM.from_engine_args(vllm().AsyncEngineArgs(**self._arguments))
            except Exception as error:  # whatever a foreign library raises while it starts
                self._home.terminate_all()
                raise EngineError(f"vLLM {vllm().version} did not start: {error}") from error

    def kill(self) -> None:
        """At once: a core holds nothing that is worth a farewell, and a polite one takes seconds."""
        llm, self.llm = self.llm, None
        if llm is not None:
            log_level = logging.getLogger("vllm").level
            logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it would report the end that we bring about
            try:
                llm.shutdown(timeout=0.0)
            except Exception as error:  # it is to go, whatever it says
                log.debug("vLLM's shutdown: %r", error)
            finally:
                logging.getLogger("vllm").setLevel(log_level)
        self._home.terminate_all()

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Returns when nothing computes. Raises whatever vLLM raises, EngineDeadError among it."""
        if not self.alive:
            raise EngineError("vLLM's core is dead")
        await self._answer(self.llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def load(self, staged: StagedDocument, ref: VersionRef) -> None:
        """Into a paused core, on every rank; then the label, then on. On any failure it stays paused."""
        if not self.alive:
            raise EngineError("vLLM's core is dead")
        await self._answer(self.llm.collective_rpc("streamrl_load", args=(staged.path, staged.entries)))
        await self._answer(self.llm.update_weight_version(str(ref)))
        await self._answer(self.llm.resume_generation())

    async def _answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What the core says. vLLM lets those who asked a core that died wait for ever: look whether it lives."""
        asked = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                if not self.alive:
                    raise EngineError("vLLM's core died before it answered")
            return asked.result()
        finally:
            asked.cancel()

    async def load_tensors(self, tensors: Mapping[str, Any], ref: VersionRef) -> None:
        staged = await asyncio.to_thread(StagedDocument, tensors)
        try:
            await self.load(staged, ref)
        finally:
            staged.close()

    async def restart(self) -> None:
        """Without weights: load some before anything is generated."""
        await asyncio.to_thread(self.kill)
        await asyncio.to_thread(self.start)

    def close(self) -> None:
        self.kill()
        self._home.close()
