"""Stop requests as a flag that the loop reads: SIGINT, SIGTERM, the launcher's exit; a second Ctrl-C exits at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from queue import SimpleQueue

from streamrl.parent_watch import watch

log = logging.getLogger("streamrl.learner")

EXIT_INTERRUPTED = 130


class StopFlag:
    """True once a stop was requested; after the launcher's exit the process may take `grace_s` for a graceful one."""

    def __init__(self, grace_s: float) -> None:
        self.reason: str | None = None
        self._grace_s = grace_s
        in_main = threading.current_thread() is threading.main_thread()  # Python delivers signals to it alone
        self._heard = SimpleQueue[str]()
        for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():
            signal.signal(number, self._received)
        if in_main:
            threading.Thread(target=_tell, args=(self._heard,), name="stop-flag", daemon=True).start()
            weakref.finalize(self, self._heard.put, "")

    def watch_launcher(self) -> None:
        """Take the launcher's exit for a request to stop from now on: there is a run that could be saved."""
        watch(self._parent_gone)

    def __call__(self) -> bool:
        return self.reason is not None

    def _received(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self.reason is not None and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        if self.reason is None:
            self.reason = name
            self._heard.put(name)

    def _parent_gone(self) -> None:
        if self.reason is None:
            self.reason = "the launcher exited"
            log.warning("%s: saving, then stopping", self.reason)
        timer = threading.Timer(self._grace_s, os._exit, (1,))
        timer.daemon = True
        timer.start()


def _tell(heard: SimpleQueue[str]) -> None:
    """Log the signal that a handler heard, which must not: it may have interrupted the writing of another line."""
    if name := heard.get():
        log.info("%s: finishing this step, saving, then stopping (again Ctrl-C: at once)", name)
