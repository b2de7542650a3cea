"""Work that grows with what a program sent: what is large leaves the event loop, a few pieces at a time.

Heartbeats of an actor and the calls of its other agents go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SMALL = 1 << 15
"""Bytes or characters that are read faster than a thread is woken."""
NUM_AT_ONCE = 2
"""Large pieces of work that run at once, each with memory of its own."""

_threads = ThreadPoolExecutor(NUM_AT_ONCE, "large-request")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, from a thread if it reads more than a little."""
    if size <= SMALL:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
