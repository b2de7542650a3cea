"""Quick calls of an environment on the event loop itself: a thread costs such a call more than the call.

    in threads   until NUM_QUICK calls of a method in a row, or nearly so, took at most QUICK_S
    inline       as long as they go on like that, in the main thread, whose calls a signal can interrupt
    in threads   again, after a call of SLOW_S, until as many quick ones in a row as all such calls took milliseconds
    in threads   for good, after one that hung; and always, where the environment says `may_block`

An inline call that runs for too long is interrupted by SIGALRM. What no signal can interrupt, a library that waits and
never comes back to Python, ends the process: its leases are given to others, and `streamrl launch` starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from asyncio import events
from collections.abc import Callable
from typing import Any, TypeVar

from actors import EXIT_ENGINE_HUNG

log = logging.getLogger("streamrl.actor")

T = TypeVar("T")
QUICK_S, SLOW_S = 1e-3, 0.1
NUM_QUICK = 32
SETBACK = 8
"""Quick calls that one which is not quick takes away: one of nine or more sends a method back to the threads."""
LONGEST_TIMER_S = 1e8
"""Years: more than this the system's timers refuse."""
AGAIN_S = 1.0
"""The interrupt is repeated for code that catches everything."""
GRACE_S = 10.0
"""For an interrupted call to end."""


class Interrupted(BaseException):
    """Raised inside an inline call that is over its time; no Exception, because environments catch those."""


class InlineCalls:
    """Knows which methods are quick, and calls them with a time limit."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._streaks: dict[object, float] = {}
        self._needed: dict[object, float] = {}  # quick calls in a row before an inline one
        self._deadline: float | None = None  # of the call that runs; monotonic
        self._name = ""
        self._owns_signal: bool | None = None

    def note(self, method: Callable[..., Any], seconds: float) -> None:
        """A call of this method took so long, on whichever thread."""
        key = _function(method)
        streak, needed = self._streaks.get(key, 0), self._needed.get(key, NUM_QUICK)
        if seconds >= SLOW_S:  # an import in the first call says nothing of the others, a service that is slow does
            self._streaks[key], self._needed[key] = 0, needed + seconds / QUICK_S
        else:
            self._streaks[key] = min(streak + 1, needed + NUM_QUICK) if seconds <= QUICK_S else max(streak - SETBACK, 0)

    def ready(self, method: Callable[..., Any]) -> bool:
        """Whether `run` may call it."""
        key = _function(method)
        return (
            self._streaks.get(key, 0) >= self._needed.get(key, NUM_QUICK)
            and not getattr(getattr(method, "__self__", None), "may_block", False)
            and threading.current_thread() is threading.main_thread() and self._has_signal()
        )

    def failed(self, error: Exception) -> None:
        """An episode was lost to this error, whichever way it was played; a debugger looks at it."""

    def _has_signal(self) -> bool:
        """Whether SIGALRM is ours: taken when first needed, unless other code uses it."""
        if self._owns_signal is None:
            self._owns_signal = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
            if self._owns_signal:
                signal.signal(signal.SIGALRM, self._interrupt)
                threading.Thread(target=self._watch, name="inline-calls", daemon=True).start()
        return self._owns_signal

    def run(self, call: Callable[[], T], limit_s: float, name: str) -> T:
        """Return the result of `call`, of a method that is `ready`. Raises `Interrupted` after limit_s."""
        loop = asyncio.get_running_loop()
        try:
            events._set_running_loop(None)  # as in a thread: the environment may run a loop of its own
            self._arm(limit_s, name)
            try:
                return call()
            finally:
                self._deadline = None  # from here on the signal does nothing
        finally:
            self._deadline = None  # again, if the signal came just before
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            events._set_running_loop(loop)

    def _arm(self, limit_s: float, name: str) -> None:
        self._name, self._deadline = name, time.monotonic() + limit_s
        signal.setitimer(signal.ITIMER_REAL, min(limit_s, LONGEST_TIMER_S), AGAIN_S)

    def _interrupt(self, number: int, frame: object) -> None:
        if self._deadline is not None:
            raise Interrupted

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._grace_s))
            if signal.getsignal(signal.SIGALRM) != self._interrupt:
                self._owns_signal = False  # an environment has taken it
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline + self._grace_s:
                log.critical("%s does not end, and no signal interrupts it: this process ends", self._name)
                logging.shutdown()
                os._exit(EXIT_ENGINE_HUNG)


def _function(method: Callable[..., Any]) -> object:
    """The function behind a bound method, the same for all instances."""
    return getattr(method, "__func__", method)
