"""Ownership of the IPC buffers on one GPU, as a pure state machine: events and `now` in, effects out.

The broadcaster fills a slot with a bucket and notifies its readers; each copies it and frees the slot. A pass sends one
document to all readers that asked before it began, in lockstep. A late reader is dropped: what it was about to copy may
be overwritten, which its digest then shows.

    of a slot     FREE -> FILLING (the shell copies) -> FULL (readers copy) -> FREE
    of a reader   WAITING (for the next pass, or for an announced version) -> READING -> dropped or done
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.messages import IpcBufferEnd, IpcBufferFilled, VersionRef

# One is filled while readers copy the other.
NUM_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy bucket `bucket` of version `ref` into slot `slot`, then call `filled`."""

    ref: VersionRef
    bucket: int
    slot: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Message to a reader: a bucket lies in a slot, or no more of a version comes."""

    reader: bytes
    message: IpcBufferFilled | IpcBufferEnd


Effect = Fill | Tell


@dataclass(slots=True)
class _Pass:
    ref: VersionRef
    next_bucket: int = 0
    readers: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _IpcBuffer:
    bucket: int = -1
    filling: bool = False
    readers: dict[bytes, float] = field(default_factory=dict)  # reader that has still to copy it -> deadline

    @property
    def free(self) -> bool:
        return not self.filling and not self.readers


class IpcBufferRing:
    """The broadcaster's view.

    Args:
        deadline_s: for a reader to copy one bucket; and to wait for a version that was announced but is not here yet.
    """

    def __init__(self, *, deadline_s: float = 10.0) -> None:
        self._deadline_s = deadline_s
        self._slots = [_IpcBuffer() for _ in range(NUM_SLOTS)]
        self._newest: VersionRef | None = None
        # Two counts: a newer document may arrive while a pass of the present one goes on.
        self._num_buckets = self._num_buckets_next = 0
        self._waiting: dict[bytes, tuple[VersionRef, float]] = {}
        self._pass: _Pass | None = None
        self._effects: list[Effect] = []
        self.num_dropped = 0

    def published(self, ref: VersionRef, num_buckets: int, now: float) -> list[Effect]:
        """A newer document is ready; a pass in progress continues to its end."""
        self._newest, self._num_buckets_next = ref, num_buckets
        for reader, (wanted, _) in list(self._waiting.items()):
            if wanted < ref:
                self._drop_waiting(reader, f"version {wanted} was retired for {ref}", gone=True)
        return self._go_on()

    def opened(self, reader: bytes, ref: VersionRef, now: float) -> list[Effect]:
        """A reader asks for a version, instead of what it asked for before."""
        self._forget(reader)
        if self._newest is not None and ref < self._newest:
            self._end(reader, ref, f"version {ref} was retired for {self._newest}", gone=True)
        else:
            self._waiting[reader] = (ref, now + self._deadline_s)
        return self._go_on()

    def filled(self, ref: VersionRef, bucket: int, slot: int, now: float) -> list[Effect]:
        """The shell has copied the bucket."""
        place = self._slots[slot]
        assert place.filling and place.bucket == bucket, (place, bucket)
        place.filling = False
        if self._pass is not None and self._pass.ref == ref:
            place.readers = dict.fromkeys(self._pass.readers, now + self._deadline_s)
            self._effects += [Tell(reader, IpcBufferFilled(ref, bucket, slot)) for reader in sorted(self._pass.readers)]
        return self._go_on()

    def fill_failed(self, ref: VersionRef, slot: int, reason: str, now: float) -> list[Effect]:
        """The document could not be read."""
        self._slots[slot].filling = False
        if self._pass is not None and self._pass.ref == ref:
            for reader in sorted(self._pass.readers):
                self._drop_reading(reader, reason)
        return self._go_on()

    def freed(self, reader: bytes, ref: VersionRef, bucket: int, now: float) -> list[Effect]:
        """A reader has copied a bucket; messages about slots that it does not hold change nothing."""
        if self._pass is not None and self._pass.ref == ref and reader in self._pass.readers:
            for slot in self._slots:
                if slot.bucket == bucket:
                    slot.readers.pop(reader, None)
        return self._go_on()

    def left(self, reader: bytes, now: float) -> list[Effect]:
        """A reader has left."""
        self._forget(reader)
        return self._go_on()

    def tick(self, now: float) -> list[Effect]:
        """Drop late readers."""
        for reader, (ref, deadline) in list(self._waiting.items()):
            if now >= deadline and (self._pass is None or self._pass.ref != ref):
                self._drop_waiting(reader, f"version {ref} did not come in {self._deadline_s:g} s")
        late = {reader for slot in self._slots for reader, deadline in slot.readers.items() if now >= deadline}
        for reader in sorted(late):
            self.num_dropped += 1
            self._drop_reading(reader, f"a bucket was not copied in {self._deadline_s:g} s")
        return self._go_on()

    # --- inside -------------------------------------------------------------------------------------------------

    def _go_on(self) -> list[Effect]:
        self._advance()
        effects, self._effects = self._effects, []
        return effects

    def _advance(self) -> None:
        """Begin a pass if none is in progress, fill free slots, end the pass."""
        while self._pass is not None or self._begin():
            current = self._pass
            for number, slot in enumerate(self._slots):
                if current.readers and slot.free and current.next_bucket < self._num_buckets:
                    slot.bucket, slot.filling = current.next_bucket, True
                    self._effects.append(Fill(current.ref, current.next_bucket, number))
                    current.next_bucket += 1
            done = current.next_bucket == self._num_buckets and all(slot.free for slot in self._slots)
            if not done and current.readers:
                return
            self._pass = None

    def _begin(self) -> bool:
        """Begin a pass for all readers that wait for the newest version; False if there is none to begin."""
        # Readers of a version that was announced but is not here yet stay waiting.
        ready = {reader for reader, (ref, _) in self._waiting.items() if ref == self._newest}
        if not ready or not all(slot.free for slot in self._slots):
            return False
        for reader in ready:
            del self._waiting[reader]
        self._pass, self._num_buckets = _Pass(self._newest, readers=ready), self._num_buckets_next
        return True

    def _forget(self, reader: bytes) -> None:
        self._waiting.pop(reader, None)
        if self._pass is not None:
            self._pass.readers.discard(reader)
        for slot in self._slots:
            slot.readers.pop(reader, None)
        self._advance()

    def _drop_waiting(self, reader: bytes, reason: str, *, gone: bool = False) -> None:
        ref, _ = self._waiting.pop(reader)
        self._end(reader, ref, reason, gone)

    def _drop_reading(self, reader: bytes, reason: str) -> None:
        assert self._pass is not None
        self._pass.readers.discard(reader)
        for slot in self._slots:
            slot.readers.pop(reader, None)
        self._end(reader, self._pass.ref, reason)

    def _end(self, reader: bytes, ref: VersionRef, reason: str, gone: bool = False) -> None:
        self._effects.append(Tell(reader, IpcBufferEnd(ref, reason[:512], gone)))
