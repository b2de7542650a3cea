"""Log lines that a peer can cause at any rate: some are written, the others are counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_CHARS = 500


class LogLimit:
    """At most `burst` lines at once, and one more every `interval_s`; the next line says how many were left out."""

    def __init__(
        self, log: logging.Logger, *, burst: int = 10, interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._burst, self._interval_s, self._clock = log, burst, interval_s, clock
        self._left, self._at = float(burst), clock()
        self._num_left_out = 0

    def warning(self, text: str, *args: object) -> None:
        """Log as `Logger.warning` does, but not too often, and cut to `MAX_CHARS`."""
        self._write(logging.WARNING, text, args)

    def info(self, text: str, *args: object) -> None:
        """Log as `Logger.info` does, within the same limit."""
        self._write(logging.INFO, text, args)

    def _write(self, level: int, text: str, args: tuple[object, ...]) -> None:
        if not self._log.isEnabledFor(level):
            return
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) / self._interval_s)
        self._at = now
        if self._left < 1.0:
            self._num_left_out += 1
            return
        self._left -= 1.0
        line = (text % args if args else text)[:MAX_CHARS]
        left_out = f" (and {self._num_left_out} more such lines before it)" if self._num_left_out else ""
        self._num_left_out = 0
        self._log.log(level, "%s%s", line, left_out)
