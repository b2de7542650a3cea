"""Outcomes passed from the engine's thread to the event loop that awaits them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

Answer = asyncio.Future[Any]


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
