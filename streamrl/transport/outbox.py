"""An actor's sent groups that the hub has not yet made DURABLE: kept as encoded frames, re-sent byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamrl.messages import SeqRange

MARGIN = 64
"""Room for the groups of leases that are still out when the outbox is full."""
MAX_SPAN = 7168
"""Most sequence numbers from the oldest entry to the next; the hub's dedup window is a little wider."""


def as_ranges(seqs: Iterable[int]) -> tuple[SeqRange, ...]:
    """Join ascending integers to inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for seq in seqs:
        if ranges and ranges[-1][1] == seq - 1:
            ranges[-1] = (ranges[-1][0], seq)
        else:
            ranges.append((seq, seq))
    return tuple(ranges)


@dataclass(slots=True)
class Entry:
    frame: bytes
    has_answers: bool = True
    settled: bool = False
    sent_at: float | None = None


class Outbox:
    """Entries in seq order: waiting (sent_at None) -> sent -> settled -> removed (durable or rejected)."""

    def __init__(self, max_groups: int, max_bytes: int) -> None:
        self.max_groups = max_groups
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: dict[int, Entry] = {}
        self.next_seq = 1

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether generation must wait until something becomes durable; nothing is ever dropped because of size."""
        oldest = next(iter(self._entries), self.next_seq)
        return (
            len(self._entries) >= self.max_groups - MARGIN
            or self.num_bytes >= self.max_bytes
            or self.next_seq - oldest >= MAX_SPAN
        )

    def add(self, frame: bytes, *, has_answers: bool = True) -> None:
        self._entries[self.next_seq] = Entry(frame, has_answers)
        self.next_seq += 1
        self.num_bytes += len(frame)

    def waiting(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.sent_at is None and not entry.settled]

    def in_flight(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.sent_at is not None and not entry.settled]

    def all_settled(self) -> bool:
        return all(entry.settled for entry in self._entries.values())

    def unsend(self) -> None:
        """Queue everything again, also what was ACCEPTED: a hub that died may not have written it to its log."""
        for entry in self._entries.values():
            entry.settled, entry.sent_at = False, None

    def settle(self, upto: int, ranges: Iterable[SeqRange] = ()) -> bool:
        """Note what the hub has judged; returns whether answers are among what it had not before."""
        fresh = [entry for seq in self._matching(upto, ranges) if not (entry := self._entries[seq]).settled]
        for entry in fresh:
            entry.settled = True
        return any(entry.has_answers for entry in fresh)

    def forget(self, upto: int, ranges: Iterable[SeqRange] = ()) -> None:
        """Remove what is durable or rejected."""
        for seq in self._matching(upto, ranges):
            self.num_bytes -= len(self._entries.pop(seq).frame)

    def _matching(self, upto: int, ranges: Iterable[SeqRange]) -> list[int]:
        spans = list(ranges)
        return [seq for seq in self._entries if seq <= upto or any(first <= seq <= last for first, last in spans)]

    def seq_ranges(self) -> tuple[SeqRange, ...]:
        """The seqs held, as inclusive ranges in order."""
        return as_ranges(self._entries)
