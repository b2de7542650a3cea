"""Calls of a user's environment with a time limit: async ones on the loop, plain ones in a few threads.

    queued      a plain call waits for one of num_threads places; no clock runs
    running     it has a place and a thread; the clock runs
    returned    the place is free again
    hung        over its time: the place is free again, the thread is abandoned until the call returns, if it ever does
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from streamrl.errors import EngineError, TaskError

MAX_ABANDONED = 16
"""Threads cannot be killed; with more than this many lost, the process asks to be restarted."""

Outcome = tuple[Any, Exception | None]


class HungCallError(TimeoutError):
    """A call of the environment ran for longer than env.step_timeout_s."""


@dataclass(slots=True, eq=False)
class _Call:
    """A plain call that has its place."""

    answer: asyncio.Future[Any]
    name: str
    clock: asyncio.TimerHandle | None = None
    hung: bool = False


class EnvExecutor:
    """At most `num_threads` plain calls run at once, not counting those that hang."""

    def __init__(self, num_threads: int) -> None:
        self._places = asyncio.Semaphore(num_threads)
        self._pool = ThreadPoolExecutor(num_threads + MAX_ABANDONED, thread_name_prefix="env")
        self.num_hung_calls = 0
        self.num_abandoned = 0
        self.num_answered: Counter[str] = Counter()  # by the name of the method: it returned or raised
        self._since: dict[object, float] = {}

    def slow(self, longer_than_s: float) -> tuple[int, float]:
        """Calls that have been running for so long, and the seconds of the longest."""
        now = asyncio.get_running_loop().time()
        ages = [now - began for began in self._since.values() if now - began > longer_than_s]
        return len(ages), max(ages, default=0.0)

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
        call = object()
        self._since[call] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limit_s) as clock:
                return await method(argument)
        except TimeoutError as error:
            if not clock.expired():
                raise  # the environment's own
            self.num_hung_calls += 1
            raise _hung(method, limit_s) from error
        finally:
            del self._since[call]
            self.num_answered[_name(method)] += not clock.expired()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run_plain(self, method: Callable[[Any], Any], argument: object, limit_s: float) -> Any:
        """A canceled caller leaves the call to its thread and its clock."""
        await self._places.acquire()
        if self.exhausted:
            self._places.release()
            raise self._exhausted()
        # A timer and one future a call: a supervising task each would cost an actor a tenth of its throughput.
        loop = asyncio.get_running_loop()
        call = _Call(loop.create_future(), _name(method))
        self._since[call] = loop.time()
        call.clock = loop.call_later(limit_s, self._give_up, call, _hung(method, limit_s))

        def ended(done: Future[Outcome]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, nothing waits for the result
                loop.call_soon_threadsafe(self._ended, call, done)

        self._pool.submit(_outcome, method, argument).add_done_callback(ended)
        result, error = await call.answer
        if error is not None:
            raise error
        return result

    def _ended(self, call: _Call, done: Future[Outcome]) -> None:
        if call.hung:
            self.num_abandoned -= 1
            return
        if call.clock is not None:
            call.clock.cancel()
        self._since.pop(call, None)
        self.num_answered[call.name] += 1
        self._places.release()
        if not call.answer.done() and not done.cancelled():
            call.answer.set_result(done.result())

    def _give_up(self, call: _Call, error: HungCallError) -> None:
        call.hung = True
        self._since.pop(call, None)
        self.num_hung_calls += 1
        self.num_abandoned += 1
        self._places.release()
        if not call.answer.done():
            call.answer.set_exception(self._exhausted() if self.exhausted else error)

    def _exhausted(self) -> EngineError:
        return EngineError(
            f"{self.num_abandoned} environment calls hang and hold a thread each, the limit is {MAX_ABANDONED}: "
            "restart this actor"
        )


def _name(method: Callable[..., Any]) -> str:
    return getattr(method, "__name__", "")


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
