"""Requests to vLLM's core and their outputs; every open request fails when the core dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from actors.engines.vllm.core import Core
from actors.engines.vllm.imports import vllm
from streamrl.errors import EngineError


class CoreDiedError(EngineError):
    """The request is lost; it may be repeated with another core."""


class RequestTracker:
    """The open requests of the present core.

    Args:
        on_death: called with an AsyncLLM that turned out to be dead.
    """

    def __init__(self, core: Core, on_death: Callable[[Any], None]) -> None:
        self.closed = False
        self.prefill_tokens = 0
        self._core, self._on_death = core, on_death
        self._numbers = count()
        self._open: set[asyncio.Task[Any]] = set()

    async def submit(self, prompt_ids: list[int], params: Any, salt: str) -> Any:
        """The finished output. Cancelling aborts the sequence.

        Raises:
            CoreDiedError: also when `cancel_all` was called. EngineError: the engine is closed, or vLLM failed.
        """
        request = asyncio.ensure_future(self._run(prompt_ids, params, salt))  # a task of its own, for `cancel_all`
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
        """Before the core is shut down: vLLM would leave its open requests waiting without limit."""
        for request in self._open:
            request.cancel()

    async def _run(self, prompt_ids: list[int], params: Any, salt: str) -> Any:
        llm = self._core.llm
        prompt = vllm().tokens_input(prompt_ids, cache_salt=salt)
        try:
            async for output in llm.generate(prompt, params, f"streamrl-{next(self._numbers)}"):
                if output.finished:
                    if output.outputs[0].finish_reason == "abort":
                        raise EngineError("the engine is closed" if self.closed else "vLLM aborted the sequence")
                    self.prefill_tokens += len(prompt_ids)
                    return output
        except EngineError:
            raise
        except Exception as error:  # of vLLM's own: it is a foreign library
            if not llm.errored:
                raise EngineError(f"vLLM failed: {error!r}") from error
            self._on_death(llm)
            raise self._lost() from error
        raise EngineError("vLLM ended a sequence without an output")

    def _lost(self) -> EngineError:
        if self.closed:
            return EngineError("the engine is closed")
        return CoreDiedError("vLLM's core died; its sequences are lost, another core is started")
