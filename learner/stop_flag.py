"""SIGINT, SIGTERM and a vanished launcher, as a flag that the loop looks at; a second Ctrl-C ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import threading

from streamrl.parent_watch import watch

log = logging.getLogger("streamrl.learner")

EXIT_IMPATIENT = 130


class StopFlag:
    """True once somebody asked this process to stop.

    Args:
        patience_s: how long after the launcher vanished the process may take for its orderly end.
    """

    def __init__(self, patience_s: float) -> None:
        self.reason: str | None = None
        self._patience_s = patience_s
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._received)
        watch(self._parent_gone)

    def __call__(self) -> bool:
        return self.reason is not None

    def _received(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self.reason is not None and number == signal.SIGINT:
            os._exit(EXIT_IMPATIENT)
        if self.reason is None:
            log.info("%s: finishing this step, saving, then stopping (again Ctrl-C: at once)", name)
            self.reason = name

    def _parent_gone(self) -> None:
        if self.reason is None:
            log.warning("the launcher is gone: saving, then stopping")
            self.reason = "the launcher is gone"
        timer = threading.Timer(self._patience_s, os._exit, (1,))
        timer.daemon = True
        timer.start()
