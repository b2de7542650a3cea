"""How long a peer was waited for in vain, over all fetches: none of them may last long enough to tell by itself."""

from __future__ import annotations

import threading

RESTS_S = 30.0
"""Who did not answer is not asked for so long."""
_ROUNDING_S = 1e-3


class PeerBackoff:
    """Of one peer at a time, by its address. Pure but for its lock; `now` is on the monotonic clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address = ""
        self._waited_s = 0.0
        self._until = float("-inf")

    def rests(self, address: str, now: float) -> bool:
        """Whether this peer is to be left alone; one at a new address is a new one."""
        with self._lock:
            return address == self._address and now < self._until

    def heard(self, address: str) -> None:
        """It said something."""
        with self._lock:
            if address == self._address:
                self._waited_s = 0.0

    def waited(self, address: str, seconds: float, limit_s: float, now: float) -> bool:
        """`seconds` went by without a word of it; True if that makes `limit_s` in a row: it rests from now on."""
        with self._lock:
            if address != self._address:
                self._address, self._waited_s, self._until = address, 0.0, float("-inf")
            self._waited_s += seconds
            if self._waited_s < limit_s - _ROUNDING_S:
                return False
            self._waited_s, self._until = 0.0, now + RESTS_S
            return True
