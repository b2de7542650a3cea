"""One request to vLLM and its answer; whoever asks hears of the core's death, also where vLLM tells nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from actors.engines.vllm.core import Core
from actors.engines.vllm.imports import vllm
from streamrl.errors import EngineError


class CoreDied(EngineError):
    """What was asked is lost; a successor may be asked again."""


class RequestTracker:
    """Everything that the present core is to answer.

    Args:
        on_death: called with an AsyncLLM that turned out to be dead.
    """

    def __init__(self, core: Core, on_death: Callable[[Any], None]) -> None:
        self.closed = False
        self.prefill_tokens = 0
        self._core, self._on_death = core, on_death
        self._numbers = count()
        self._asked: set[asyncio.Task[Any]] = set()

    async def ask(self, prompt_ids: list[int], params: Any, salt: str) -> Any:
        """The finished output. Cancelling aborts the sequence.

        Raises:
            CoreDied: also when `cancel_all` was called. EngineError: the engine is closed, or vLLM gave it up.
        """
        asked = asyncio.ensure_future(self._ask(prompt_ids, params, salt))  # a task of its own, for `cancel_all`
        self._asked.add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            if (caller := asyncio.current_task()) is not None and caller.cancelling():
                raise
            raise self._lost() from None
        finally:
            self._asked.discard(asked)

    def cancel_all(self) -> None:
        """The core is to be shut down: vLLM would let those who wait for its answers wait for ever."""
        for asked in self._asked:
            asked.cancel()

    async def _ask(self, prompt_ids: list[int], params: Any, salt: str) -> Any:
        llm = self._core.llm
        prompt = vllm().tokens_input(prompt_ids, cache_salt=salt)
        try:
            async for output in llm.generate(prompt, params, f"streamrl-{next(self._numbers)}"):
                if output.finished:
                    if output.outputs[0].finish_reason == "abort":
                        raise EngineError("the engine is closed" if self.closed else "vLLM gave the sequence up")
                    self.prefill_tokens += len(prompt_ids)
                    return output
        except EngineError:
            raise
        except Exception as error:  # of vLLM's own making: it is a foreign library
            if not llm.errored:
                raise EngineError(f"vLLM failed: {error!r}") from error
            self._on_death(llm)
            raise self._lost() from error
        raise EngineError("vLLM ended a sequence without an answer")

    def _lost(self) -> EngineError:
        if self.closed:
            return EngineError("the engine is closed")
        return CoreDied("vLLM's core died; its sequences are lost, another core is started")
