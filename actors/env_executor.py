"""Calls of a user's environment with a time limit: async ones on the loop, plain ones in a few threads.

    queued      a plain call waits for one of num_threads places; no clock runs
    running     it has a place and a thread; the clock runs
    returned    the place is free again
    hung        over its time: the place is free again, the thread is abandoned until the call returns, if it ever does
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamrl.errors import EngineError, TaskError

MAX_ABANDONED = 16
"""Threads cannot be killed; with more than this many lost, the process asks to be restarted."""

Outcome = tuple[Any, Exception | None]


class HungCallError(TimeoutError):
    """A call of the environment ran for longer than env.step_timeout_s."""


class EnvExecutor:
    """At most `num_threads` plain calls run at once, not counting those that hang."""

    def __init__(self, num_threads: int) -> None:
        self._places = asyncio.Semaphore(num_threads)
        self._pool = ThreadPoolExecutor(num_threads + MAX_ABANDONED, thread_name_prefix="env")
        self.num_hung_calls = 0
        self.num_abandoned = 0

    @property
    def exhausted(self) -> bool:
        """Too many threads are lost; every plain call is refused from now on."""
        return self.num_abandoned > MAX_ABANDONED

    async def run(self, method: Callable[[Any], Any], argument: object, limit_s: float) -> Any:
        """What `method(argument)` returns. The limit counts from its start, not from this call.

        Raises:
            HungCallError: it ran for longer than limit_s.
            EngineError: too many threads are lost to hung calls.
            Exception: whatever the method raised; TaskError for what would end the process (SystemExit and its like).
        """
        if not inspect.iscoroutinefunction(method):
            return await self._run_plain(method, argument, limit_s)
        try:
            async with asyncio.timeout(limit_s) as clock:
                return await method(argument)
        except TimeoutError as error:
            if not clock.expired():
                raise  # the environment's own
            self.num_hung_calls += 1
            raise _hung(method, limit_s) from error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run_plain(self, method: Callable[[Any], Any], argument: object, limit_s: float) -> Any:
        await self._places.acquire()
        # Shielded: a caller that is cancelled leaves the call to its thread and its clock.
        result, error = await asyncio.shield(asyncio.ensure_future(self._supervise(method, argument, limit_s)))
        if error is not None:
            raise error
        return result

    async def _supervise(self, method: Callable[[Any], Any], argument: object, limit_s: float) -> Outcome:
        """Run a call that has a place, and release that when the call returns or hangs."""
        if self.exhausted:
            self._places.release()
            return None, self._exhausted()
        call = asyncio.wrap_future(self._pool.submit(_outcome, method, argument))
        try:
            await asyncio.wait({call}, timeout=limit_s)
        finally:
            self._places.release()
        if call.done():
            return call.result()
        self.num_hung_calls += 1
        self.num_abandoned += 1
        call.add_done_callback(self._returned)
        return None, self._exhausted() if self.exhausted else _hung(method, limit_s)

    def _returned(self, call: asyncio.Future[Outcome]) -> None:
        self.num_abandoned -= 1

    def _exhausted(self) -> EngineError:
        return EngineError(
            f"{self.num_abandoned} environment calls hang and hold a thread each, the limit is {MAX_ABANDONED}: "
            "restart this actor"
        )


def where(method: Callable[..., Any]) -> str:
    """Class and method, for messages."""
    return getattr(method, "__qualname__", repr(method))


def _hung(method: Callable[..., Any], limit_s: float) -> HungCallError:
    return HungCallError(f"{where(method)} ran for more than env.step_timeout_s={limit_s:g}")


def _outcome(method: Callable[[Any], Any], argument: object) -> Outcome:
    """Result or error, as a value: a future cannot carry StopIteration, and SystemExit would end the loop."""
    try:
        return method(argument), None
    except Exception as error:
        return None, error
    except BaseException as error:
        return None, TaskError(f"{where(method)} raised {type(error).__name__}: environments must raise an Exception")
