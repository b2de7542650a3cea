"""How many bytes may leave now, under a cap of bytes per second. Pure: the clock comes from outside."""

from __future__ import annotations

from collections.abc import Callable

_SHORTEST_WAIT_S = 0.001  # a deficit of a fraction of a byte must still let the clock move


class ByteBudget:
    """A token bucket that holds a tenth of a second, but at least one chunk.

    Args:
        bytes_per_s: the cap.
        chunk_bytes: the largest amount that is asked for at once.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_s: float, chunk_bytes: int, clock: Callable[[], float]) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._room = max(chunk_bytes, bytes_per_s / 10)
        self._left, self._at = self._room, clock()

    def spend(self, nbytes: int) -> float:
        """Seconds to wait; 0 when the bytes are granted."""
        now = self._clock()
        self._left = min(self._room, self._left + (now - self._at) * self._rate)
        self._at = now
        if nbytes <= self._left:
            self._left -= nbytes
            return 0.0
        return max((nbytes - self._left) / self._rate, _SHORTEST_WAIT_S)
