"""Calls of a user's environment with a time limit: async ones on the loop, plain ones in a few threads, or inline.

    queued      a plain call waits for one of num_threads places; no clock runs
    running     it has a place and a thread; the clock runs
    returned    the place is free again
    hung        over its time: the place is free again, the thread is abandoned until the call returns, if it ever does
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from actors.env_calls.inline import InlineCalls, Interrupted
from envs.call_clock import of_this_call
from streamrl.errors import EngineError, TaskError

MAX_ABANDONED = 16
"""Threads cannot be killed; with more than this many lost, the process asks to be restarted."""

NUM_AT_FIRST, MAX_WAITING = 4, 64
"""Plain calls at once where env.num_threads does not say: first, and while they mostly wait, as for a service."""
MAX_CPU, SMOOTHING = 0.3, 0.1
"""More of a core than this must stay for the actor's own loop; weight of the newest call in the average."""

Outcome = tuple[Any, Exception | None, float, float]
"""Result, error, the seconds that the call computed and waited, and the share of its time that it computed."""

_THIS_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # Linux has it

NOTHING: Any = object()
"""The argument of a method that takes none."""


class HungCallError(TimeoutError):
    """A call of the environment ran for longer than env.step_timeout_s."""


@dataclass(slots=True, eq=False)
class _Call:
    """A plain call that has its place."""

    answer: asyncio.Future[Any]
    method: Callable[[Any], Any]
    clock: asyncio.TimerHandle | None = None
    hung: bool = False


class CallClock:
    """The time that a call has left; it passes from `start` on, but not between `pause` and `resume`."""

    def __init__(self, limit_s: float, since: dict[object, float]) -> None:
        self._limit_s, self._since = limit_s, since
        self._timeout: asyncio.Timeout | None = None
        self._over = False

    def start(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self.resume()

    def pause(self) -> None:
        self._since.pop(self, None)
        self._move(None)

    def stop(self) -> None:
        """The call is over; what it waited for may end later."""
        self._over = True
        self._since.pop(self, None)

    def resume(self) -> None:
        """The whole limit again."""
        if self._over:
            return
        now = asyncio.get_running_loop().time()
        self._since[self] = now
        self._move(now + self._limit_s)

    def _move(self, when: float | None) -> None:
        assert self._timeout is not None
        with contextlib.suppress(RuntimeError):  # it has run out, or the call is ending
            self._timeout.reschedule(when)


class EnvExecutor:
    """Executor of at most `num_threads` plain calls at once, not counting those that hang.

    Args:
        num_threads: None begins with NUM_AT_FIRST, and goes up to MAX_WAITING while calls queue and mostly wait.
        inline: makes the calls that have proved to be quick; without it every plain one gets a thread.
    """

    def __init__(self, num_threads: int | None, inline: InlineCalls | None = None) -> None:
        self._inline = inline
        self.num_places = num_threads or NUM_AT_FIRST
        self._most_places = num_threads or MAX_WAITING
        self._cpu_share = 1.0  # of the time of a recent plain call
        self._num_queued = 0
        self._places = asyncio.Semaphore(self.num_places)
        self._pool = ThreadPoolExecutor(self._most_places + MAX_ABANDONED, thread_name_prefix="env")
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
        """Return the result of `method(argument)`; of `method()` for NOTHING. The limit counts from its start, not from
        this call.

        Raises:
            HungCallError: it ran for longer than limit_s.
            EngineError: too many threads are lost to hung calls.
            Exception: whatever the method raised; TaskError for what would end the process (SystemExit and its like).
        """
        if not inspect.iscoroutinefunction(method):
            # An inline call needs a place like any other: with one thread, calls of an environment never overlap.
            if self._inline is not None and not self._places.locked() and self._inline.ready(method):
                return self._run_inline(self._inline, method, argument, limit_s)
            return await self._run_plain(method, argument, limit_s)
        async with self.clocked(method, limit_s):
            return await _called(method, argument)

    @contextlib.asynccontextmanager
    async def clocked(self, method: Callable[..., Any], limit_s: float) -> AsyncIterator[CallClock]:
        """Clock an `async` call; its clock can be stopped while something else is waited for. Raises as `run` does."""
        call, task = CallClock(limit_s, self._since), asyncio.current_task()
        try:
            async with asyncio.timeout(None) as timeout:
                call.start(timeout)
                of_this_call.set(call)
                yield call
        except TimeoutError as error:
            if not timeout.expired():
                raise  # the environment's own
            self.num_hung_calls += 1
            raise _hung(method, limit_s) from error
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise  # the caller's
            raise _not_an_exception(method, error) from error
        except (SystemExit, KeyboardInterrupt) as error:
            raise _not_an_exception(method, error) from error
        finally:
            call.stop()
            self.num_answered[_name(method)] += not timeout.expired()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_inline(
        self, inline: InlineCalls, method: Callable[[Any], Any], argument: object, limit_s: float
    ) -> Any:
        if self.exhausted:
            raise self._exhausted()
        try:
            result, error, seconds, _ = inline.run(lambda: _outcome(method, argument), limit_s, where(method))
        except Interrupted:
            inline.note(method, math.inf)
            self.num_hung_calls += 1
            raise _hung(method, limit_s) from None
        inline.note(method, seconds)
        self.num_answered[_name(method)] += 1
        if error is not None:
            raise error
        return result

    async def _run_plain(self, method: Callable[[Any], Any], argument: object, limit_s: float) -> Any:
        """A canceled caller leaves the call to its thread and its clock."""
        self._num_queued += 1
        try:
            await self._places.acquire()
        finally:
            self._num_queued -= 1
        if self.exhausted:
            self._places.release()
            raise self._exhausted()
        # A timer and one future a call: a supervising task each would cost an actor a tenth of its throughput.
        loop = asyncio.get_running_loop()
        call = _Call(loop.create_future(), method)
        self._since[call] = loop.time()
        call.clock = loop.call_later(limit_s, self._give_up, call, _hung(method, limit_s))

        def ended(done: Future[Outcome]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, nothing waits for the result
                loop.call_soon_threadsafe(self._ended, call, done)

        self._pool.submit(_outcome, method, argument).add_done_callback(ended)
        result, error, *_ = await call.answer
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
        self.num_answered[_name(call.method)] += 1
        if done.cancelled():
            self._places.release()
            return
        *_, seconds, cpu_share = done.result()
        self._note(call.method, seconds)
        self._free_places(cpu_share)
        if not call.answer.done():
            call.answer.set_result(done.result())

    def _free_places(self, cpu_share: float) -> None:
        """The place of a call that ended, and one more while more calls would only wait side by side.

        Threads of plain Python share one core, so `num_places` calls with this share of CPU time use so much of it.
        """
        self._cpu_share += SMOOTHING * (cpu_share - self._cpu_share)
        self._places.release()
        if self._num_queued and self.num_places < self._most_places and self._cpu_share * self.num_places < MAX_CPU:
            self.num_places += 1
            self._places.release()

    def _give_up(self, call: _Call, error: HungCallError) -> None:
        call.hung = True
        self._note(call.method, math.inf)
        self._since.pop(call, None)
        self.num_hung_calls += 1
        self.num_abandoned += 1
        self._places.release()
        if not call.answer.done():
            call.answer.set_exception(self._exhausted() if self.exhausted else error)

    def _note(self, method: Callable[[Any], Any], seconds: float) -> None:
        if self._inline is not None:
            self._inline.note(method, seconds)

    def _exhausted(self) -> EngineError:
        return EngineError(
            f"{self.num_abandoned} environment calls hang and hold a thread each, the limit is {MAX_ABANDONED}: "
            "restart this actor"
        )


def _called(method: Callable[..., Any], argument: object) -> Any:
    return method() if argument is NOTHING else method(argument)


def _name(method: Callable[..., Any]) -> str:
    return getattr(method, "__name__", "")


def where(method: Callable[..., Any]) -> str:
    """Class and method, for messages."""
    return getattr(method, "__qualname__", None) or repr(method)  # only if needed: an environment's may be long


def _hung(method: Callable[..., Any], limit_s: float) -> HungCallError:
    return HungCallError(f"{where(method)} ran for more than env.step_timeout_s={limit_s:g}")


def _outcome(method: Callable[[Any], Any], argument: object) -> Outcome:
    """Result or error, as a value: a future cannot carry StopIteration, and SystemExit would end the loop."""
    began, cpu, waits, result, failure = time.perf_counter(), time.thread_time(), num_waits(), None, None
    try:
        result = _called(method, argument)
    except Exception as error:
        failure = error
    except Interrupted:
        raise
    except BaseException as error:
        failure = _not_an_exception(method, error)
    seconds, computed = time.perf_counter() - began, time.thread_time() - cpu
    # It waited for nothing: the rest of the time went to other processes of a busy machine, and says nothing of it.
    taken = computed if num_waits() == waits else seconds
    return result, failure, taken, computed / max(1e-9, seconds)


def num_waits() -> float:
    """Count how often this thread gave its processor away to wait; NaN, unequal to itself, where nobody counts."""
    return resource.getrusage(_THIS_THREAD).ru_nvcsw if _THIS_THREAD is not None else math.nan


def _not_an_exception(method: Callable[..., Any], error: BaseException) -> TaskError:
    """The error in place of a BaseException, which would end the loop or pass for a canceled lease."""
    return TaskError(f"{where(method)} raised {type(error).__name__}: environments must raise an Exception")
