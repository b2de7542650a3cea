"""The clock of the call of an environment that runs: it stands while the call waits for no work of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Clock(Protocol):
    """Counts the time of one call against env.step_timeout_s."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


of_this_call: ContextVar[Clock | None] = ContextVar("call_clock", default=None)


@contextmanager
def stopped() -> Iterator[None]:
    """Stop the clock of the `async` call inside; afterwards it has the whole limit again. Without one, do nothing."""
    clock = of_this_call.get()
    if clock is not None:
        clock.pause()
    try:
        yield
    finally:
        if clock is not None:
            clock.resume()
