"""Deadlines around collective calls that may never return.

Collective calls block in C until every rank has joined, and a rank that died keeps the others waiting. So each
communicator's calls run in a thread of its own, with a deadline. `abort` from another thread ends a call in progress; a
thread that does not return even then is abandoned and counted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any

import torch

from streamrl.errors import EngineError, WeightsError
from streamrl.weights.gpu.nccl import CupyCommunicator, CupyNccl

log = logging.getLogger(__name__)

ABORT_DEADLINE_S = 5.0
"""An abort that takes longer will not return."""


class CommunicatorError(WeightsError):
    """The communicator failed, was aborted, or was too slow; it must not be used again."""


class CommunicatorStuck(EngineError):
    """A call neither returns nor can be aborted: the process must be restarted."""


class CallingThread:
    """A thread that makes blocking calls, one after another, until one of them never returns."""

    def __init__(self, name: str) -> None:
        # None ends the thread.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        call: Future[Any] = Future()
        self._calls.put((work, call))
        return call

    def request_exit(self) -> None:
        """Exit after the current call returns."""
        self._calls.put(None)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            work, call = asked
            try:
                call.set_result(work())
            except BaseException as error:  # re-raised in the waiting thread
                call.set_exception(error)


class Threads:
    """The threads of a process that were abandoned inside a call."""

    def __init__(self) -> None:
        self._abandoned: list[threading.Thread] = []

    @property
    def num_abandoned(self) -> int:
        """Abandoned threads that are still inside their call."""
        return sum(thread.is_alive() for thread in self._abandoned)

    def abandon(self, thread: threading.Thread) -> None:
        self._abandoned.append(thread)


class GuardedCommunicator:
    """One communicator whose every call has a deadline. Call its methods from one thread, `stop` from any.

    Args:
        threads: shared by all communicators of the process.
        rank, world, unique_id: this rank's place in the group.
    """

    def __init__(
        self, library: CupyNccl, threads: Threads, *, rank: int, world: int, unique_id: bytes, what: str
    ) -> None:
        self._library, self._threads, self._what = library, threads, what
        self._rank, self._world, self._unique_id = rank, world, unique_id
        self._inner: CupyCommunicator | None = None
        self._stop: Future[None] = Future()  # waited for beside a call
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
        """Broadcast as `CupyCommunicator.broadcast` does, within `deadline_s`.

        Raises:
            CommunicatorError: it failed or was too slow; the communicator was aborted.
            CommunicatorStuck: the abort did not return either.
        """
        assert self._inner is not None, "form comes first"
        inner = self._inner
        self._call(lambda: inner.broadcast(buffer), deadline_s, "a broadcast")

    def stop(self) -> None:
        """Request an abort of the call in progress; the thread that waits for it carries it out. Returns at once."""
        with contextlib.suppress(InvalidStateError):  # stopped before
            self._stop.set_result(None)

    @property
    def stopped(self) -> bool:
        return self._stop.done()

    def close(self) -> None:
        """Leave the group by an abort: closing waits for the other ranks in some versions of NCCL."""
        self._caller.request_exit()
        if self._inner is not None and not self._dead:
            self._dead = True
            self._abort(self._inner)

    def _call(self, work: Callable[[], Any], deadline_s: float, what: str) -> Any:
        if self._dead or self.stopped:
            raise CommunicatorError(f"{self._what} is over")
        call = self._caller.begin(work)
        wait((call, self._stop), deadline_s, FIRST_COMPLETED)
        try:
            if call.done():
                return call.result()
            end = "was stopped" if self.stopped else f"was not done in {deadline_s:g} s"
            raise CommunicatorError(f"{self._what}: {what} {end}")
        except Exception as error:
            self._dead = True
            self._caller.request_exit()
            if self._inner is not None:
                self._abort(self._inner)
                # The abort lets the blocked call return; a thread that still does not is lost.
                wait((call,), ABORT_DEADLINE_S)
            if not call.done():
                self._threads.abandon(self._caller.thread)
                if self._inner is not None:
                    raise CommunicatorStuck(
                        f"{self._what}: {what} did not end {ABORT_DEADLINE_S:g} s after its abort: restart this process"
                    ) from error
            if isinstance(error, CommunicatorError):
                raise
            raise CommunicatorError(f"{self._what} failed: {error!r}") from error

    def _abort(self, inner: CupyCommunicator) -> None:
        thread = CallingThread(f"{self._what}: its abort")
        call = thread.begin(inner.abort)
        thread.request_exit()
        wait((call,), ABORT_DEADLINE_S)
        if not call.done():
            self._threads.abandon(thread.thread)
            raise CommunicatorStuck(
                f"{self._what}: its abort was not done in {ABORT_DEADLINE_S:g} s: restart this process"
            )
        if (error := call.exception()) is not None:  # already destroyed, which is the goal
            log.info("%s: abort raised %r", self._what, error)
