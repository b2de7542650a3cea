"""IPC buffers: none is written while a reader still copies it, every reader gets every bucket or an error in time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.messages import IpcBufferEnd, IpcBufferFilled, VersionRef
from streamrl.weights.gpu.ipc_buffers import NUM_SLOTS, Fill, IpcBufferRing, Tell

DEADLINE_S = 5.0
A, B, C = b"a", b"b", b"c"


def v(number: int) -> VersionRef:
    return VersionRef(1, number)


def ring(version: int = 1, buckets: int = 3) -> IpcBufferRing:
    one = IpcBufferRing(deadline_s=DEADLINE_S)
    one.published(v(version), buckets, 0.0)
    return one


def test_two_slots_are_filled_ahead_and_a_freed_one_takes_the_next_bucket():
    one = ring()

    assert one.opened(A, v(1), 0.0) == [Fill(v(1), 0, 0), Fill(v(1), 1, 1)]
    assert one.filled(v(1), 0, 0, 0.0) == [Tell(A, IpcBufferFilled(v(1), 0, 0))]
    assert one.filled(v(1), 1, 1, 0.0) == [Tell(A, IpcBufferFilled(v(1), 1, 1))]
    assert one.freed(A, v(1), 0, 0.0) == [Fill(v(1), 2, 0)]
    assert one.filled(v(1), 2, 0, 0.0) == [Tell(A, IpcBufferFilled(v(1), 2, 0))]


def test_a_slot_is_written_again_only_when_every_reader_has_copied_it():
    one = IpcBufferRing(deadline_s=DEADLINE_S)
    one.opened(A, v(1), 0.0)
    one.opened(B, v(1), 0.0)
    one.published(v(1), 3, 0.0)
    one.filled(v(1), 0, 0, 0.0)
    one.filled(v(1), 1, 1, 0.0)

    assert one.freed(A, v(1), 0, 1.0) == []
    assert one.freed(B, v(1), 0, 1.0) == [Fill(v(1), 2, 0)]


def test_a_late_reader_is_dropped_and_the_others_go_on():
    one = IpcBufferRing(deadline_s=DEADLINE_S)
    one.opened(A, v(1), 0.0)
    one.opened(B, v(1), 0.0)
    one.published(v(1), 3, 0.0)
    one.filled(v(1), 0, 0, 0.0)
    one.filled(v(1), 1, 1, 0.0)
    for bucket in (0, 1):
        one.freed(A, v(1), bucket, 1.0)

    end, fill = one.tick(DEADLINE_S)
    assert (end.reader, end.message.gone) == (B, False) and fill == Fill(v(1), 2, 0)
    assert one.freed(B, v(1), 0, 6.0) == []  # too late to mean anything


def test_who_comes_during_a_pass_gets_the_next_one():
    one = ring(buckets=1)
    one.opened(A, v(1), 0.0)

    assert one.opened(B, v(1), 0.0) == []
    one.filled(v(1), 0, 0, 0.0)
    assert one.freed(A, v(1), 0, 0.0) == [Fill(v(1), 0, 0)]
    assert one.filled(v(1), 0, 0, 0.0) == [Tell(B, IpcBufferFilled(v(1), 0, 0))]


def test_an_old_version_is_gone_and_a_coming_one_is_waited_for():
    one = ring(version=4)

    assert one.opened(A, v(3), 0.0) == [Tell(A, IpcBufferEnd(v(3), "version 1:3 was retired for 1:4", gone=True))]
    assert one.opened(A, v(5), 0.0) == []
    assert one.published(v(5), 1, 1.0) == [Fill(v(5), 0, 0)]


def test_a_version_that_never_comes_ends_the_wait():
    one = ring()
    one.opened(A, v(9), 0.0)

    (end,) = one.tick(DEADLINE_S)
    assert (end.reader, end.message.ref, end.message.gone) == (A, v(9), False)


def test_a_newer_version_waits_for_the_pass_that_is_under_way():
    one = ring(buckets=2)
    one.opened(A, v(1), 0.0)
    one.opened(B, v(2), 0.0)

    assert one.published(v(2), 1, 0.0) == []
    one.filled(v(1), 0, 0, 0.0)
    one.filled(v(1), 1, 1, 0.0)
    one.freed(A, v(1), 0, 0.0)
    assert one.freed(A, v(1), 1, 0.0) == [Fill(v(2), 0, 0)]


def test_readers_are_told_when_the_document_cannot_be_read():
    one = ring()
    one.opened(A, v(1), 0.0)

    assert one.fill_failed(v(1), 0, "no such file", 0.0) == [Tell(A, IpcBufferEnd(v(1), "no such file"))]
    one.filled(v(1), 1, 1, 0.0)
    assert one.opened(A, v(1), 0.0) == [Fill(v(1), 0, 0), Fill(v(1), 1, 1)]


class Slots(RuleBasedStateMachine):
    """Readers that come, copy, stall, leave and lie; a sender that publishes; a shell that fills or fails."""

    @initialize()
    def start(self) -> None:
        self.one, self.now, self.version = IpcBufferRing(deadline_s=DEADLINE_S), 0.0, 0
        self.buckets: dict[VersionRef, int] = {}
        self.filling: dict[int, Fill] = {}
        self.reading: dict[tuple[bytes, int], tuple[VersionRef, int]] = {}  # (reader, slot) -> what it may copy now
        self.got: dict[bytes, list[int]] = {}
        self.wants: dict[bytes, VersionRef] = {}

    def carry_out(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Fill(ref, bucket, slot):
                    assert slot not in self.filling and slot < NUM_SLOTS and bucket < self.buckets[ref]
                    assert not [key for key in self.reading if key[1] == slot], "a slot is written while it is read"
                    self.filling[slot] = effect
                case Tell(reader, IpcBufferFilled(ref, bucket, slot)):
                    assert self.wants.get(reader) == ref and slot not in self.filling
                    assert bucket == len(self.got[reader]), "buckets come in order, each once"
                    self.got[reader].append(bucket)
                    self.reading[reader, slot] = (ref, bucket)
                case Tell(reader, IpcBufferEnd(ref)):
                    assert self.wants.get(reader) == ref
                    self.forget(reader)

    def forget(self, reader: bytes) -> None:
        self.wants.pop(reader, None)
        self.reading = {key: what for key, what in self.reading.items() if key[0] != reader}

    @rule(buckets=st.integers(1, 4))
    def publish(self, buckets: int) -> None:
        self.version += 1
        self.buckets[v(self.version)] = buckets
        self.carry_out(self.one.published(v(self.version), buckets, self.now))

    @rule(reader=st.sampled_from([A, B, C]), ahead=st.integers(-1, 1))
    def open(self, reader: bytes, ahead: int) -> None:
        self.forget(reader)
        self.wants[reader], self.got[reader] = v(max(1, self.version + ahead)), []
        self.carry_out(self.one.opened(reader, self.wants[reader], self.now))

    @precondition(lambda self: self.filling)
    @rule(works=st.booleans())
    def fill(self, works: bool) -> None:
        """In the order in which it was asked for, as the one thread does it."""
        slot = next(iter(self.filling))
        fill = self.filling.pop(slot)
        if works:
            self.carry_out(self.one.filled(fill.ref, fill.bucket, slot, self.now))
        else:
            self.carry_out(self.one.fill_failed(fill.ref, slot, "broken", self.now))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def free(self, data) -> None:
        reader, slot = data.draw(st.sampled_from(sorted(self.reading)))
        ref, bucket = self.reading.pop((reader, slot))
        if bucket == self.buckets[ref] - 1:
            self.wants.pop(reader)
        self.carry_out(self.one.freed(reader, ref, bucket, self.now))

    @rule(reader=st.sampled_from([A, B, C]), version=st.integers(1, 5), bucket=st.integers(0, 4))
    def lie(self, reader: bytes, version: int, bucket: int) -> None:
        """A word about a bucket that it was never told of."""
        if (v(version), bucket) not in [what for key, what in self.reading.items() if key[0] == reader]:
            self.carry_out(self.one.freed(reader, v(version), bucket, self.now))

    @rule(reader=st.sampled_from([A, B, C]))
    def leave(self, reader: bytes) -> None:
        self.forget(reader)
        self.carry_out(self.one.left(reader, self.now))

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.one.tick(self.now))

    @invariant()
    def there_are_never_more_fills_than_slots(self) -> None:
        assert len(getattr(self, "filling", {})) <= NUM_SLOTS

    def teardown(self) -> None:
        """Once every party behaves, each waiting reader gets its version or is told why not."""
        for _ in range(200):
            for slot in list(self.filling):
                fill = self.filling.pop(slot)
                self.carry_out(self.one.filled(fill.ref, fill.bucket, slot, self.now))
            for reader, slot in list(self.reading):
                if (reader, slot) in self.reading:
                    ref, bucket = self.reading.pop((reader, slot))
                    if bucket == self.buckets[ref] - 1:
                        self.wants.pop(reader)
                    self.carry_out(self.one.freed(reader, ref, bucket, self.now))
            if not self.wants:
                return
            self.now += 1.0
            self.carry_out(self.one.tick(self.now))
        assert not self.wants


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
