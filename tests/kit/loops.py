"""Asynchronous tests: `async def test_..` runs under a deadline of real time, on a loop whose clock may jump."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

DEADLINE_S = 30.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time passes as usual, and at once when the test says so."""

    jumped_s = 0.0

    def time(self) -> float:
        return super().time() + self.jumped_s


def jumping(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Run this test on a `JumpingLoop`."""
    test.loop_factory = JumpingLoop  # type: ignore[attr-defined]
    return test


async def jump(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.jumped_s += seconds
    for _ in range(5):  # what is due now runs before this goes on
        await asyncio.sleep(0)


def run(work: Callable[[], Awaitable[Any]], *, loop_factory: Callable[[], Any] | None = None) -> None:
    """The deadline is one of real time, whatever the loop's clock says."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()
        task = loop.create_task(work())
        alarm = threading.Timer(DEADLINE_S, lambda: loop.call_soon_threadsafe(task.cancel, "over the deadline"))
        alarm.start()
        try:
            loop.run_until_complete(task)
        finally:
            alarm.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again; the time limit is that of `run`."""
    while not condition():
        await asyncio.sleep(0.001)
