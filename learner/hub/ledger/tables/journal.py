"""The records that changes of the ledger leave for the run's log, in order."""

from __future__ import annotations

from collections import deque

from learner.hub.ledger.tables.groups import Delivery
from streamrl.stream.records import Record


class Journal:
    """Numbers records; the shell takes and writes them, and says how far they are durable.

    Attributes:
        muted: changes are in the log already.
    """

    def __init__(self) -> None:
        self.next_sequence = 1
        self.muted = False
        self._waiting: list[Record] = []
        self._unsynced: deque[tuple[int, Delivery]] = deque()

    @property
    def first_waiting(self) -> int:
        """The number of the next record that `take` gives."""
        return self.next_sequence - len(self._waiting)

    def append(self, record: Record, delivery: Delivery | None = None) -> int:
        """Add a record; returns its number. `delivery` becomes durable with it."""
        sequence = self.next_sequence
        if not self.muted:
            self.next_sequence += 1
            self._waiting.append(record)
            if delivery is not None:
                self._unsynced.append((sequence, delivery))
        return sequence

    def take(self) -> list[Record]:
        """Take what was added since the last call."""
        taken, self._waiting = self._waiting, []
        return taken

    def synced(self, sequence: int) -> list[Delivery]:
        """Take the deliveries whose records, up to this number, survive a crash."""
        done = []
        while self._unsynced and self._unsynced[0][0] <= sequence:
            done.append(self._unsynced.popleft()[1])
        return done
