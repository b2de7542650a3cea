"""Services that a test talks to, in a thread of its process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_thread(service: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Run the service on an event loop of its own and yield what it gives."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(30)
        asyncio.run_coroutine_threadsafe(service.__aexit__(None, None, None), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
