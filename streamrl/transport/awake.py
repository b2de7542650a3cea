"""The time in which a process could hear others: what they did while it stood still is not known to it."""

from __future__ import annotations

import time
from collections.abc import Callable

STANDSTILL_S = 2.0
"""A process that waits asks for the time far more often than this; a longer gap was no silence of others."""


class AwakeClock:
    """Monotonic seconds, without those in which this process was stopped, its machine was frozen, or it did not ask.

    All that waits in one loop, of the hub or of a rank, goes by one of these: leases, actors and hubs that were stopped
    together go on together.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked_at, self._lost_s = clock, clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._asked_at > STANDSTILL_S:
            self._lost_s += now - self._asked_at
        self._asked_at = now
        return now - self._lost_s
