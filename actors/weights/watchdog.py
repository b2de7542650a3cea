"""How long an engine may be silent before it is presumed wedged. The one place where an actor finds that out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from actors.engines.base import Engine
from streamrl.errors import EngineError

T = TypeVar("T")


class EngineHungError(EngineError):
    """The engine did not do what it was asked, and nothing else either; nobody knows what it holds now."""


async def run_with_watchdog(engine: Engine, work: Awaitable[T], *, silent_s: float, doing: str) -> T:
    """The result of `work`, which asks something of `engine`; patient with one that is busy, not with one that hangs.

    The clock starts anew whenever the engine gives a sign of life: it took a step, a sequence ended, or it says that
    it is rightly held up (`EngineStats.blocked`).

    Args:
        silent_s: seconds without a sign of life after which `work` is cancelled.
        doing: what it was asked, for the error: "install version 1:7".
    Raises:
        EngineHungError: it was silent for so long. Whatever `work` raises goes through.
    """
    try:
        async with asyncio.timeout(silent_s) as clock:
            watch = asyncio.ensure_future(_keep_winding(engine, clock, silent_s))
            try:
                return await work
            finally:
                watch.cancel()
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise EngineHungError(
            f"{engine.name} did not {doing} and gave no sign of life within {silent_s:g} s: it is presumed wedged, "
            "restart this actor"
        ) from error


async def _keep_winding(engine: Engine, clock: asyncio.Timeout, silent_s: float) -> None:
    loop, before = asyncio.get_running_loop(), _signs(engine)
    while not clock.expired():
        await asyncio.sleep(silent_s / 10)
        now = _signs(engine)
        if (now != before or engine.stats().blocked) and not clock.expired():
            clock.reschedule(loop.time() + silent_s)
        before = now


def _signs(engine: Engine) -> tuple[int, ...]:
    stats = engine.stats()
    return stats.tokens_total, stats.prefill_tokens_total, stats.steps_total
