"""Deliveries of each incarnation of each actor: the tables that make a repeated message harmless.

A sequence number is *settled* once it is accepted or rejected, and *durable* once its outcome is in the run's log on
disk or will never matter again. A rejected number is durable at once: its sender forgets it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from learner.hub.ledger.tables.groups import Delivery
from streamrl.messages import Ack, Rejection, RejectReason, SeqRange
from streamrl.transport.outbox import as_ranges

MAX_FENCED = 64  # incarnations remembered for each actor
# Senders without a link that are remembered. Forgetting one is safe, because (group, member) is the authority.
MAX_DEPARTED = 4096
FORGET_AFTER_SAVES = 2  # the first may have been frozen before the sender left
_MAX_RANGES, _MAX_REJECTED = 256, 64  # as many as an ACK may list


@dataclass(slots=True)
class SeqWindow:
    """A set of positive integers: everything up to `upto`, and bits above it."""

    upto: int = 0
    bits: int = 0

    def __contains__(self, seq: int) -> bool:
        return seq <= self.upto or bool(self.bits >> (seq - self.upto - 1) & 1)

    def add(self, seq: int) -> None:
        if seq > self.upto:
            self.bits |= 1 << (seq - self.upto - 1)
            self._absorb()

    def raise_to(self, upto: int) -> None:
        """Add everything up to a number, however far it is."""
        if upto > self.upto:
            self.bits >>= upto - self.upto
            self.upto = upto
            self._absorb()

    def _absorb(self) -> None:
        """Move `upto` over the ones that touch it."""
        num_ones = (~self.bits & (self.bits + 1)).bit_length() - 1
        self.upto += num_ones
        self.bits >>= num_ones

    def ranges(self) -> tuple[SeqRange, ...]:
        """List what lies above `upto`, as inclusive ranges."""
        return as_ranges(self.upto + 1 + i for i in range(self.bits.bit_length()) if self.bits >> i & 1)


def outbox_error(outbox: Sequence[SeqRange], next_seq: int, window: int) -> str | None:
    """Return what is wrong with the outbox of a HELLO, if anything."""
    previous = 0
    for first, last in outbox:
        if not previous < first <= last < next_seq:
            return f"outbox range {first}..{last} must lie between {previous + 1} and {next_seq - 1}, in order"
        previous = last
    if outbox and next_seq - outbox[0][0] > window:
        return f"the outbox reaches from seq {outbox[0][0]} to {next_seq - 1}, further than the window of {window}"
    return None


class DedupRow(Struct, array_like=True):
    """A sender in the checkpoint. Bits are stored as bytes: they are wider than any integer of the format."""

    actor_id: str
    incarnation: int
    settled_upto: int
    settled_bits: bytes
    durable_upto: int
    durable_bits: bytes
    departed: bool


class DedupEntry:
    """One incarnation of one actor."""

    def __init__(
        self, actor_id: str, incarnation: int, window: int, due: set[tuple[str, int]] | None = None
    ) -> None:
        self.actor_id = actor_id
        self.incarnation = incarnation
        self._due = set() if due is None else due  # the table's senders that are to be told something
        self.settled = SeqWindow()
        self.durable = SeqWindow()
        self._window = window
        self._rejections: OrderedDict[int, Rejection] = OrderedDict()
        self._to_accept: set[int] = set()
        self._to_make_durable: set[int] = set()
        self._to_reject: dict[int, Rejection] = {}
        self._dirty = False

    def place(self, seq: int) -> Literal["new", "repeat", "beyond"]:
        """Tell where a number falls: not yet judged, judged before, or further ahead than any honest sender goes."""
        if seq in self.settled:
            return "repeat"
        return "beyond" if seq > self.settled.upto + self._window else "new"

    def forget_all_but(self, outbox: Sequence[SeqRange], next_seq: int) -> None:
        """Settle all numbers below `next_seq` outside the outbox, which is valid: the sender never sends them again."""
        # A number whose ack the sender acted on, but which no checkpoint remembers, would otherwise hold the low-water
        # mark down forever after a restart.
        starts = [first for first, _ in outbox] + [next_seq]
        ends = [last for _, last in outbox]
        for seqs in (self.settled, self.durable):
            seqs.raise_to(starts[0] - 1)
            for last, following in zip(ends, starts[1:], strict=True):
                for seq in range(last + 1, following):
                    seqs.add(seq)

    def _mark_due(self) -> None:
        self._due.add((self.actor_id, self.incarnation))

    def accept(self, seq: int) -> None:
        self._mark_due()
        self.settled.add(seq)
        self._to_accept.add(seq)

    def reject(self, seq: int, reason: RejectReason, detail: str, *, settle: bool = True) -> None:
        self._mark_due()
        rejection = Rejection(seq, reason, detail[:256])
        self._to_reject[seq] = rejection
        if settle:
            self.settled.add(seq)
            self.durable.add(seq)
            # Remembered, because a repeat of this number must get the same answer.
            self._rejections[seq] = rejection
            if len(self._rejections) > self._window:
                self._rejections.popitem(last=False)

    def repeat(self, seq: int) -> None:
        """Put what was answered about this number into the next ack again."""
        self._mark_due()
        if seq in self._rejections:
            self._to_reject[seq] = self._rejections[seq]
        elif seq > self.settled.upto:
            self._to_accept.add(seq)
        if seq in self.durable and seq > self.durable.upto:
            self._to_make_durable.add(seq)
        self._dirty = True

    @property
    def num_to_accept(self) -> int:
        """Number of accepted messages that the next ack tells of."""
        return len(self._to_accept)

    def make_durable(self, seq: int) -> None:
        if seq not in self.durable:
            self._mark_due()
            self.durable.add(seq)
            self._to_make_durable.add(seq)

    def take_ack(self) -> Ack | None:
        """Take the next ack, or None if there is none due. What does not fit one message stays for the next."""
        accepted = as_ranges(sorted(seq for seq in self._to_accept if seq > self.settled.upto))
        durable = as_ranges(sorted(seq for seq in self._to_make_durable if seq > self.durable.upto))
        rejected = list(self._to_reject.items())
        if not (self._dirty or self._to_accept or self._to_make_durable or rejected):
            self._due.discard((self.actor_id, self.incarnation))
            return None
        self._to_accept = _beyond(accepted[_MAX_RANGES:])
        self._to_make_durable = _beyond(durable[_MAX_RANGES:])
        self._to_reject = dict(rejected[_MAX_REJECTED:])
        self._dirty = False
        return Ack(
            incarnation=self.incarnation, settled_upto=self.settled.upto, accepted=accepted[:_MAX_RANGES],
            durable_upto=self.durable.upto, durable=durable[:_MAX_RANGES],
            rejected=tuple(rejection for _, rejection in rejected[:_MAX_REJECTED]),
        )

    def row(self, *, departed: bool) -> DedupRow:
        return DedupRow(
            self.actor_id, self.incarnation, self.settled.upto, _to_bytes(self.settled.bits), self.durable.upto,
            _to_bytes(self.durable.bits), departed,
        )


class DedupTable:
    """All senders the hub remembers, and the incarnations that may never return."""

    def __init__(self, window: int) -> None:
        self.num_saves = 0
        self.window = window
        self._entries: dict[tuple[str, int], DedupEntry] = {}
        self._departed: OrderedDict[tuple[str, int], int] = OrderedDict()
        """Senders without a link, in the order they left: how many checkpoints had been published by then."""
        self._current: dict[str, int] = {}
        self._fenced: OrderedDict[str, deque[int]] = OrderedDict()
        self.due: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, actor_id: str, incarnation: int) -> DedupEntry | None:
        return self._entries.get((actor_id, incarnation))

    def is_fenced(self, actor_id: str, incarnation: int) -> bool:
        return incarnation in self._fenced.get(actor_id, ())

    def open(self, actor_id: str, incarnation: int) -> tuple[DedupEntry, int | None]:
        """Open the entry of a HELLO's sender; returns it and the incarnation that it supersedes, if any."""
        older = self._current.get(actor_id)
        fenced = older if older != incarnation else None
        if fenced is not None:
            self._fence(actor_id, fenced)
        self._current[actor_id] = incarnation
        entry = self._entries.get((actor_id, incarnation))
        if entry is None:
            entry = DedupEntry(actor_id, incarnation, self.window, self.due)
            self._entries[actor_id, incarnation] = entry
        self._departed.pop((actor_id, incarnation), None)
        return entry, fenced

    def known(self, actor_id: str, incarnation: int) -> DedupEntry:
        """Return the entry of a sender of the log, made if need be; it has no link yet."""
        entry = self.get(actor_id, incarnation)
        if entry is None:
            entry, _ = self.open(actor_id, incarnation)
            self._leave(entry)
        return entry

    def make_durable(self, deliveries: Iterable[Delivery]) -> None:
        """Settle the outcome of these for good; a sender that is forgotten by now needs no ack."""
        for delivery in deliveries:
            entry = self.get(delivery.actor_id, delivery.incarnation)
            if entry is not None:
                entry.make_durable(delivery.seq)

    def depart(self, actor_id: str, incarnation: int) -> None:
        """Note that a sender has no link; it may come back, so it is remembered for a while."""
        entry = self.get(actor_id, incarnation)
        if entry is not None:
            self._leave(entry)
        while len(self._departed) > MAX_DEPARTED:
            self._forget(next(iter(self._departed)))

    def _leave(self, entry: DedupEntry) -> None:
        key = (entry.actor_id, entry.incarnation)
        self._departed[key] = self.num_saves
        self._departed.move_to_end(key)

    def saved(self) -> None:
        """Note a published checkpoint: fenced senders that two of them have seen are forgotten."""
        self.num_saves += 1
        for key, left_at in list(self._departed.items()):
            if self.num_saves - left_at >= FORGET_AFTER_SAVES and self.is_fenced(*key):
                self._forget(key)

    def _fence(self, actor_id: str, incarnation: int) -> None:
        # Bounded: incarnations are drawn at random, so a forgotten one does not come back by chance.
        self._fenced.setdefault(actor_id, deque(maxlen=MAX_FENCED)).append(incarnation)
        self._fenced.move_to_end(actor_id)
        if len(self._fenced) > MAX_DEPARTED:
            self._fenced.popitem(last=False)
        self.depart(actor_id, incarnation)

    def _forget(self, key: tuple[str, int]) -> None:
        del self._entries[key]
        self._departed.pop(key, None)
        self.due.discard(key)
        if self._current.get(key[0]) == key[1]:
            del self._current[key[0]]

    def rows(self) -> list[DedupRow]:
        return [entry.row(departed=key in self._departed) for key, entry in self._entries.items()]

    def fenced_rows(self) -> list[tuple[str, list[int]]]:
        return [(actor_id, list(incarnations)) for actor_id, incarnations in self._fenced.items()]

    def load(self, rows: Iterable[DedupRow], fenced: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Fill a new table from a checkpoint. No actor is linked yet, so every sender counts as departed.

        A snapshot leaves the hub once the log has all that it knows: what was settled by then is durable.
        """
        for actor_id, incarnations in fenced:
            self._fenced[actor_id] = deque(incarnations, maxlen=MAX_FENCED)
        for row in rows:
            entry = DedupEntry(row.actor_id, row.incarnation, self.window, self.due)
            entry.settled = SeqWindow(row.settled_upto, int.from_bytes(row.settled_bits, "little"))
            entry.durable = SeqWindow(row.settled_upto, int.from_bytes(row.settled_bits, "little"))
            self._entries[row.actor_id, row.incarnation] = entry
            self._leave(entry)
            if not self.is_fenced(row.actor_id, row.incarnation):
                self._current[row.actor_id] = row.incarnation


def _beyond(ranges: Sequence[SeqRange]) -> set[int]:
    return {seq for first, last in ranges for seq in range(first, last + 1)}


def _to_bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
