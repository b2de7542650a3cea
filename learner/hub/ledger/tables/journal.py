"""The records that changes of the ledger leave for the run's log, in order."""

from __future__ import annotations

from collections import deque

from learner.hub.ledger.tables.groups import Delivery
from streamrl.stream.records import GroupArrived, Record


class Journal:
    """Numbers records; the shell takes and writes them, and says how far they are durable."""

    def __init__(self) -> None:
        self.next_sequence = 1
        self._waiting: list[Record] = []
        self._unsynced: deque[tuple[int, Delivery]] = deque()

    @property
    def first_waiting(self) -> int:
        """The number of the next record that `take` gives."""
        return self.next_sequence - len(self._waiting)

    def append(self, record: Record) -> int:
        """Add a record; returns its number. The delivery of an accepted group becomes durable with it."""
        sequence = self.next_sequence
        self.next_sequence += 1
        self._waiting.append(record)
        if isinstance(record, GroupArrived) and not record.refused:
            self._unsynced.append((sequence, Delivery(record.actor_id, record.incarnation, record.seq)))
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
