"""Does the sender process still work, or does it only exist? Pure: its words and `now` in, a verdict out."""

from __future__ import annotations

START_S = 300.0
"""For its first word: it loads its libraries and opens its device."""
_LONGEST_TICK_S = 1.0


class BroadcasterWatch:
    """Counts the silence of one sender after the other.

    A hub that was itself stopped has heard nobody, whoever spoke: of a long gap between two ticks only a second counts.

    Args:
        silence_s: longer without a word, and the sender hangs.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._limit_s = START_S
        self._silent_s = 0.0
        self._ticked_at: float | None = None

    def started(self) -> None:
        """A new sender; nothing is expected of it before it has said its first word."""
        self._limit_s, self._silent_s = START_S, 0.0

    def heard(self) -> None:
        """It said something, whatever it was."""
        self._limit_s, self._silent_s = self._silence_s, 0.0

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self._ticked_at is not None:
            self._silent_s += min(now - self._ticked_at, _LONGEST_TICK_S)
        self._ticked_at = now

    @property
    def silent_s(self) -> float:
        """Seconds since its last word."""
        return self._silent_s

    @property
    def hangs(self) -> bool:
        return self._silent_s > self._limit_s
