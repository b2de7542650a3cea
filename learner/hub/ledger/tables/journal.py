"""The records that changes of the ledger leave for the run's log, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from learner.hub.ledger.tables.groups import Delivery
from streamrl.stream.records import Record


class Journal:
    """Numbers records; the shell takes and writes them, and says how far they are durable.

    Args:
        next_sequence: the number of the first record.
    """

    def __init__(self, next_sequence: int = 1) -> None:
        self.next_sequence = next_sequence
        self._waiting: list[Record] = []
        self._unsynced: deque[tuple[int, Delivery]] = deque()
        self._muted = False

    @property
    def first_waiting(self) -> int:
        """The number of the next record that `take` gives."""
        return self.next_sequence - len(self._waiting)

    def append(self, record: Record, delivery: Delivery | None = None) -> int:
        """Add a record; returns its number. `delivery` becomes durable with it."""
        sequence = self.next_sequence
        if not self._muted:
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

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Changes inside the block are in the log already."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False
