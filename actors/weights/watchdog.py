"""Watchdog of the engine: the one place where an actor finds that it hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from actors.engines.base import Engine
from streamrl.errors import EngineError

T = TypeVar("T")
SECONDS_PER_GB = 10.0
"""More patience for a document: copying it moves no counter of the engine, and neighbors may share the way."""


class EngineHungError(EngineError):
    """The engine made no progress; what it holds now is unknown."""


def patience(silent_s: float, nbytes: int) -> float:
    """The seconds that an engine may show no progress while it takes a document of this size."""
    return silent_s + SECONDS_PER_GB * (nbytes // 10**9)


async def run_with_watchdog(engine: Engine, work: Awaitable[T], *, silent_s: float, doing: str) -> T:
    """The result of `work`, an operation of `engine` that may take long but must not hang.

    Every step, every ended sequence and every `EngineStats.blocked` extends the deadline. `doing` says what it is.

    Raises:
        EngineHungError: no progress in `silent_s` seconds; `work` is cancelled. Whatever it raises goes through.
    """
    try:
        async with asyncio.timeout(silent_s) as deadline:
            watch = asyncio.ensure_future(_extend_deadline(engine, deadline, silent_s))
            try:
                return await work
            finally:
                watch.cancel()
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EngineHungError(
            f"{engine.name} did not {doing} and made no progress for {silent_s:g} s: it is presumed hung, "
            "restart this actor"
        ) from error


async def _extend_deadline(engine: Engine, deadline: asyncio.Timeout, silent_s: float) -> None:
    loop, before = asyncio.get_running_loop(), _progress(engine)
    while not deadline.expired():
        await asyncio.sleep(silent_s / 10)
        now = _progress(engine)
        if (now != before or engine.stats().blocked) and not deadline.expired():
            deadline.reschedule(loop.time() + silent_s)
        before = now


def _progress(engine: Engine) -> tuple[int, ...]:
    stats = engine.stats()
    return stats.tokens_total, stats.prefill_tokens_total, stats.steps_total
