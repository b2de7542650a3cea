"""The communicator interface, and deadlines around collective calls that may never return.

Collective calls block in C until every rank has joined, and a rank that died keeps the others waiting. So each
communicator's calls run in a thread of its own, with a deadline. `abort` from another thread ends a call in progress; a
thread that does not return even then is abandoned and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from streamrl.errors import EngineError, WeightsError

log = logging.getLogger(__name__)

ABORT_DEADLINE_S = 5.0
"""An abort that takes longer will not return."""
# `stop` comes from another thread, so a waiting thread looks up this often.
_LOOK_UP_S = 0.05


class Communicator(Protocol):
    """One rank of one group that never changes. Methods block; after any failure only `abort` may be called."""

    def test(self) -> None:
        """A one-element all-reduce; raises WeightsError unless it counts every rank."""
        ...

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Copy rank 0's bytes (uint8, contiguous) into every rank's buffer; complete when this returns."""
        ...

    def abort(self) -> None:
        """End whatever is in progress here; callable from any thread."""
        ...

    def close(self) -> None:
        """Destroy a healthy communicator."""
        ...


class CommunicatorLibrary(Protocol):
    """Makes communicators: NCCL through cupy, or a stand-in of the tests."""

    name: str

    def unique_id(self) -> bytes:
        """Names a new group; called by its rank 0."""
        ...

    def connect(self, world: int, unique_id: bytes, rank: int) -> Communicator:
        """Blocks until all ranks have connected."""
        ...


class CommunicatorError(WeightsError):
    """The communicator failed, was aborted, or was too slow; it must not be used again."""


class CommunicatorStuck(EngineError):
    """A call neither returns nor can be aborted: the process must be restarted."""


@dataclass(slots=True)
class _Call:
    work: Callable[[], Any]
    value: Any = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class CallingThread:
    """A thread that makes blocking calls, one after another, until one of them never returns."""

    def __init__(self, name: str) -> None:
        # None ends the thread.
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def begin(self, work: Callable[[], Any]) -> _Call:
        call = _Call(work)
        self._calls.put(call)
        return call

    def request_exit(self) -> None:
        """Exit after the current call returns."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.value = call.work()
            except BaseException as error:  # re-raised in the waiting thread
                call.error = error
            finally:
                call.done.set()


class Threads:
    """Runs blocking calls in threads that can be abandoned; counts those that never returned."""

    def __init__(self) -> None:
        self._abandoned: set[threading.Thread] = set()
        self._lock = threading.Lock()

    @property
    def num_abandoned(self) -> int:
        """Abandoned threads that are still inside their call."""
        with self._lock:
            self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
            return len(self._abandoned)

    def run(
        self, work: Callable[[], Any], *, deadline_s: float, stop: threading.Event, what: str,
        caller: CallingThread | None = None,
    ) -> Any:
        """Run `work` in another thread; return or raise what it does.

        Args:
            caller: makes the call; None starts a thread for it.
        Raises:
            CommunicatorError: not done within `deadline_s`, or `stop` was set. The thread still runs and takes no more
                calls: end its call and `join` it, or `abandon` it. The error's `thread` is the one.
        """
        one = caller or CallingThread(what)
        call = one.begin(work)
        # A thread of one call: told at once to end after it.
        if caller is None:
            one.request_exit()
        deadline = time.monotonic() + deadline_s
        while not call.done.wait(min(_LOOK_UP_S, max(0.0, deadline - time.monotonic()))):
            late = time.monotonic() >= deadline
            if late or stop.is_set():
                one.request_exit()
                error = CommunicatorError(f"{what} was not done in {deadline_s:g} s" if late else f"{what} was stopped")
                error.thread = one.thread  # type: ignore[attr-defined]
                raise error
        if call.error is not None:
            raise call.error
        return call.value

    def abandon(self, thread: threading.Thread) -> None:
        with self._lock:
            self._abandoned.add(thread)


class GuardedCommunicator:
    """One communicator whose every call has a deadline. Call its methods from one thread, `stop` from any.

    Args:
        threads: shared by all communicators of the process.
        rank, world, unique_id: this rank's place in the group.
    """

    def __init__(
        self, library: CommunicatorLibrary, threads: Threads, *, rank: int, world: int, unique_id: bytes, what: str
    ) -> None:
        self._library, self._threads, self._what = library, threads, what
        self._rank, self._world, self._unique_id = rank, world, unique_id
        self._inner: Communicator | None = None
        self._stop = threading.Event()
        self._dead = False
        self._caller = CallingThread(what)

    def form(self, deadline_s: float) -> None:
        """Connect and test.

        Raises:
            CommunicatorError: not formed; a thread that still waits for the others is abandoned: nothing can end it.
        """
        deadline = time.monotonic() + deadline_s
        inner = self._inner = self._call(
            lambda: self._library.connect(self._world, self._unique_id, self._rank), deadline_s, "connecting"
        )
        # The test shows that data passes between all ranks; it shares the deadline of connecting.
        self._call(inner.test, max(0.0, deadline - time.monotonic()), "its test")

    def broadcast(self, buffer: torch.Tensor, deadline_s: float) -> None:
        """Broadcast as `Communicator.broadcast` does, within `deadline_s`.

        Raises:
            CommunicatorError: it failed or was too slow; the communicator was aborted.
            CommunicatorStuck: the abort did not return either.
        """
        assert self._inner is not None, "form comes first"
        inner = self._inner
        self._call(lambda: inner.broadcast(buffer), deadline_s, "a broadcast")

    def stop(self) -> None:
        """Request an abort of the call in progress; the thread that waits for it carries it out. Returns at once."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        """Leave the group; a healthy communicator is closed, a stopped one aborted."""
        if self._inner is None or self._dead:
            self._caller.request_exit()
            return
        self._dead = True
        self._caller.request_exit()
        # Closing waits for the other ranks in some versions of NCCL; aborting does not.
        self._end(self._inner)

    def _call(self, work: Callable[[], Any], deadline_s: float, what: str) -> Any:
        inner = self._inner
        if self._dead or (inner is not None and self._stop.is_set()):
            raise CommunicatorError(f"{self._what} is over")
        try:
            return self._threads.run(
                work, deadline_s=deadline_s, stop=self._stop, what=f"{self._what}: {what}", caller=self._caller
            )
        except Exception as error:
            self._dead = True
            self._caller.request_exit()
            thread = getattr(error, "thread", None)
            if inner is not None:
                self._end(inner)
                if thread is not None:
                    # The abort lets the blocked call return; a thread that still does not is lost.
                    thread.join(ABORT_DEADLINE_S)
            if thread is not None and thread.is_alive():
                self._threads.abandon(thread)
                if inner is not None:
                    raise CommunicatorStuck(
                        f"{self._what}: {what} did not end {ABORT_DEADLINE_S:g} s after its abort: restart this process"
                    ) from error
            raise _as_ours(error, self._what) from error

    def _end(self, inner: Communicator) -> None:
        try:
            self._threads.run(
                inner.abort, deadline_s=ABORT_DEADLINE_S, stop=threading.Event(), what=f"{self._what}: its abort"
            )
        except CommunicatorError as error:
            if (thread := getattr(error, "thread", None)) is None:
                raise
            self._threads.abandon(thread)
            raise CommunicatorStuck(f"{error}: restart this process") from error
        except Exception as error:  # already destroyed, which is the goal
            log.info("%s: abort raised %r", self._what, error)


def _as_ours(error: Exception, what: str) -> CommunicatorError:
    return error if isinstance(error, CommunicatorError) else CommunicatorError(f"{what} failed: {error!r}")
