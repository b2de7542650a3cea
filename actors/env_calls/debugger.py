"""Calls of an environment for somebody who debugs it (`launch.debug`): in the main thread, for as long as they take.

`breakpoint()` in them stands in pdb; what they raise is looked at where it was raised, before the episode is lost.
Time stands still meanwhile for the actor's loop: none of its own time limits passes.
"""

from __future__ import annotations

import asyncio
import pdb
import sys
import time
from asyncio import events
from bdb import BdbQuit
from collections.abc import Callable
from typing import Any, TypeVar

from actors.env_calls.inline import InlineCalls

T = TypeVar("T")
LONGEST_TURN_S = 1.0
"""The actor's loop wakes five times a second; what took longer stood in a debugger."""


class DebuggedCalls(InlineCalls):
    """Makes every plain call in the thread of the loop, without a time limit.

    Args:
        quit_run: called when a debugger was left with `quit`.
    """

    def __init__(self, quit_run: Callable[[], object]) -> None:
        super().__init__()
        self._quit_run = quit_run
        self._seen: BaseException | None = None

    def ready(self, method: Callable[..., Any]) -> bool:
        return True

    def run(self, call: Callable[[], T], limit_s: float, name: str) -> T:
        loop = asyncio.get_running_loop()
        events._set_running_loop(None)  # as in a thread: the environment may run a loop of its own
        try:
            return call()
        finally:
            events._set_running_loop(loop)

    def failed(self, error: Exception) -> None:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first one is the user's own
            cause = cause.__cause__
        if cause is self._seen:  # of a call for several episodes
            return
        self._seen = cause
        if isinstance(cause, BdbQuit) or _looked_at(cause):
            self._quit_run()


def _looked_at(error: BaseException) -> bool:
    """Stand where the error was raised; whether the debugger was left with `quit`."""
    print(f"{type(error).__name__}: {error}\ncontinue goes on without this episode, quit ends the run", file=sys.stderr)
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
    return bool(debugger.quitting)


def stand(*_: Any, **__: Any) -> None:
    """`sys.breakpointhook`: pdb that leaves Ctrl-C to the run."""
    pdb.Pdb(nosigint=True).set_trace(sys._getframe().f_back)


class PatientLoop(asyncio.SelectorEventLoop):
    """A loop whose clock does not count the time in which one of its calls stood in a debugger."""

    def __init__(self) -> None:
        self._lost_s, self._read_at = 0.0, time.monotonic()
        super().__init__()

    def time(self) -> float:
        now = time.monotonic()
        if now - self._read_at > LONGEST_TURN_S:
            self._lost_s += now - self._read_at
        self._read_at = now
        return now - self._lost_s
