"""IPC buffers: none is written while a reader still copies it, every reader gets every bucket or an error in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.messages import IpcBufferEnd, IpcBufferFilled, IpcBufferFree, IpcBufferOpen, Layout, Message, VersionRef
from streamrl.weights.gpu.ipc import NUM_SLOTS, IpcBufferRing
from streamrl.weights.manifest import make_layout

DEADLINE_S = 5.0
A, B, C = b"a", b"b", b"c"


def v(number: int) -> VersionRef:
    return VersionRef(1, number)


class Source:
    """A document whose buckets are one byte long; `broken` are those that cannot be read."""

    def __init__(self, ref: VersionRef, num_buckets: int, note: Callable[[VersionRef, int, int], None]) -> None:
        self.layout: Layout = make_layout([(f"w{n}", "uint8", (1,)) for n in range(num_buckets)], 1)
        self.broken: set[int] = set()
        self._ref, self._note = ref, note

    def fill(self, index: int, out: torch.Tensor) -> None:
        if index in self.broken:
            raise WeightsError("no such file")
        self._note(self._ref, index, int(out[0]))


class FakeWire:
    """Readers as a script: `steps` are called, one each time that no message is left, and may leave messages."""

    def __init__(self) -> None:
        self.now = 0.0
        self.inbox: deque[tuple[bytes, Message]] = deque()
        self.told: list[tuple[bytes, Message]] = []
        self.filled: list[tuple[VersionRef, int, int]] = []
        self.steps: deque[Callable[[], None]] = deque()
        self.on_tell: Callable[[bytes, Message], bool] = lambda reader, message: True
        slots = [torch.tensor([number], dtype=torch.uint8) for number in range(NUM_SLOTS)]
        self.ring = IpcBufferRing(
            self, slots, deadline_s=DEADLINE_S, stopped=lambda: not self.steps and not self.inbox,
            clock=lambda: self.now,
        )

    def source(self, version: int, num_buckets: int) -> Source:
        return Source(v(version), num_buckets, lambda *fill: self.filled.append(fill))

    def receive(self, timeout_s: float) -> tuple[bytes, Message] | None:
        if not self.inbox and timeout_s and self.steps:
            self.steps.popleft()()
        return self.inbox.popleft() if self.inbox else None

    def send(self, reader: bytes, message: Message) -> bool:
        self.told.append((reader, message))
        return self.on_tell(reader, message)

    # --- steps ----------------------------------------------------------------------------------------------------

    def says(self, reader: bytes, message: Message) -> Callable[[], None]:
        return lambda: self.inbox.append((reader, message))

    def wait(self, seconds: float) -> Callable[[], None]:
        def step() -> None:
            self.now += seconds

        return step

    def run(self, *steps: Callable[[], None]) -> None:
        self.steps.extend(steps)
        while self.steps or self.inbox:
            self.ring.serve()

    def ends(self, reader: bytes) -> list[IpcBufferEnd]:
        return [message for who, message in self.told if who == reader and isinstance(message, IpcBufferEnd)]


@pytest.fixture
def wire() -> FakeWire:
    return FakeWire()


def test_two_slots_are_filled_ahead_and_a_freed_one_takes_the_next_bucket(wire):
    wire.ring.publish(v(1), wire.source(1, 3))
    wire.run(wire.says(A, IpcBufferOpen(v(1))), lambda: None)

    assert wire.filled == [(v(1), 0, 0), (v(1), 1, 1)]
    assert wire.told == [(A, IpcBufferFilled(v(1), 0, 0)), (A, IpcBufferFilled(v(1), 1, 1))]


def test_a_slot_is_written_again_only_when_every_reader_has_copied_it(wire):
    before: list[int] = []
    wire.run(
        wire.says(A, IpcBufferOpen(v(1))), wire.says(B, IpcBufferOpen(v(1))),
        lambda: wire.ring.publish(v(1), wire.source(1, 3)), wire.says(A, IpcBufferFree(v(1), 0)),
        lambda: before.append(len(wire.filled)), wire.says(B, IpcBufferFree(v(1), 0)), lambda: None, lambda: None,
    )

    assert before == [2] and wire.filled[2:] == [(v(1), 2, 0)]
    assert [who for who, message in wire.told if message == IpcBufferFilled(v(1), 2, 0)] == [A, B]


def test_a_late_reader_is_dropped_and_the_others_go_on(wire):
    wire.run(
        wire.says(A, IpcBufferOpen(v(1))), wire.says(B, IpcBufferOpen(v(1))),
        lambda: wire.ring.publish(v(1), wire.source(1, 3)), wire.says(A, IpcBufferFree(v(1), 0)),
        wire.says(A, IpcBufferFree(v(1), 1)), wire.wait(DEADLINE_S), wire.says(B, IpcBufferFree(v(1), 0)), lambda: None,
    )

    (end,) = wire.ends(B)
    assert not end.gone and "not copied in 5 s" in end.reason and not wire.ends(A)
    assert (A, IpcBufferFilled(v(1), 2, 0)) in wire.told and (B, IpcBufferFilled(v(1), 2, 0)) not in wire.told


def test_who_comes_during_a_pass_gets_the_next_one(wire):
    wire.ring.publish(v(1), wire.source(1, 1))
    wire.run(
        wire.says(A, IpcBufferOpen(v(1))), wire.says(B, IpcBufferOpen(v(1))), wire.says(A, IpcBufferFree(v(1), 0)),
        lambda: None, lambda: None,
    )

    assert wire.told == [(A, IpcBufferFilled(v(1), 0, 0)), (B, IpcBufferFilled(v(1), 0, 0))]


def test_an_old_version_is_gone_and_a_coming_one_is_waited_for(wire):
    wire.ring.publish(v(4), wire.source(4, 1))
    wire.run(wire.says(A, IpcBufferOpen(v(3))), wire.says(A, IpcBufferOpen(v(5))))
    assert wire.told == [(A, IpcBufferEnd(v(3), "version 1:3 was retired for 1:4", gone=True))]

    wire.ring.publish(v(5), wire.source(5, 1))
    wire.run(lambda: None, lambda: None)
    assert wire.told[1:] == [(A, IpcBufferFilled(v(5), 0, 0))]


def test_a_version_that_never_comes_ends_the_wait(wire):
    wire.ring.publish(v(1), wire.source(1, 3))
    wire.run(wire.says(A, IpcBufferOpen(v(9))), wire.wait(DEADLINE_S))

    assert [(end.ref, end.gone) for end in wire.ends(A)] == [(v(9), False)]


def test_a_newer_version_waits_for_the_pass_that_is_under_way(wire):
    wire.ring.publish(v(1), wire.source(1, 2))
    wire.run(
        wire.says(A, IpcBufferOpen(v(1))), wire.says(B, IpcBufferOpen(v(2))),
        lambda: wire.ring.publish(v(2), wire.source(2, 1)), wire.says(A, IpcBufferFree(v(1), 0)),
        wire.says(A, IpcBufferFree(v(1), 1)), lambda: None, lambda: None,
    )

    assert wire.filled == [(v(1), 0, 0), (v(1), 1, 1), (v(2), 0, 0)]
    assert wire.told[-1] == (B, IpcBufferFilled(v(2), 0, 0))


def test_readers_are_told_when_the_document_cannot_be_read(wire):
    source = wire.source(1, 3)
    source.broken = {0}
    wire.ring.publish(v(1), source)
    wire.run(wire.says(A, IpcBufferOpen(v(1))), lambda: None)

    assert wire.told == [(A, IpcBufferEnd(v(1), "it cannot be read: WeightsError('no such file')"))]
    source.broken = set()
    wire.run(wire.says(A, IpcBufferOpen(v(1))), lambda: None)
    assert [fill[1] for fill in wire.filled] == [0, 1]


class History(FakeWire):
    """Readers that come, copy, stall, leave and lie; a broadcaster that publishes and sometimes cannot read."""

    def __init__(self, data: st.DataObject, num_steps: int) -> None:
        super().__init__()
        self._data, self.version = data, 0
        self.steps.extend([self.step] * num_steps + [self.honest_step] * 200)
        self.buckets: dict[VersionRef, int] = {}
        self.reading: dict[tuple[bytes, int], tuple[VersionRef, int]] = {}  # (reader, slot) -> what it may copy now
        self.got: dict[bytes, int] = {}
        self.wants: dict[bytes, VersionRef] = {}
        self.honest = False
        self.on_tell = self.check

    def draw(self, strategy: st.SearchStrategy):
        return self._data.draw(strategy)

    def honest_step(self) -> None:
        self.honest = True
        if self.reading:
            self.free()
        else:
            self.now += 1.0

    def step(self) -> None:
        getattr(self, self.draw(st.sampled_from(["publish", "open", "free", "free", "lie", "leave", "sleep"])))()

    def publish(self) -> None:
        self.version += 1
        self.buckets[v(self.version)] = buckets = self.draw(st.integers(1, 4))
        source = Source(v(self.version), buckets, self.fills)
        source.broken = self.draw(st.sets(st.integers(0, 12), max_size=2))
        self.ring.publish(v(self.version), source)

    def open(self) -> None:
        reader = self.draw(st.sampled_from([A, B, C]))
        self.forget(reader)
        self.wants[reader] = v(max(1, self.version + self.draw(st.integers(-1, 1))))
        self.got[reader] = 0
        self.inbox.append((reader, IpcBufferOpen(self.wants[reader])))

    def free(self) -> None:
        if self.reading:
            reader, slot = sorted(self.reading)[0] if self.honest else self.draw(st.sampled_from(sorted(self.reading)))
            ref, bucket = self.reading.pop((reader, slot))
            if self.got[reader] == self.buckets[ref] and reader not in {who for who, _ in self.reading}:
                self.wants.pop(reader)
            self.inbox.append((reader, IpcBufferFree(ref, bucket)))

    def lie(self) -> None:
        """A message about a bucket that the reader was never told of."""
        reader, ref = self.draw(st.sampled_from([A, B, C])), v(self.draw(st.integers(1, 5)))
        bucket = self.draw(st.integers(0, 4))
        if (ref, bucket) not in [what for key, what in self.reading.items() if key[0] == reader]:
            self.inbox.append((reader, IpcBufferFree(ref, bucket)))

    def leave(self) -> None:
        reader = self.draw(st.sampled_from([A, B, C]))
        self.forget(reader)
        self.inbox.append((reader, IpcBufferEnd(v(1), "abandoned")))

    def sleep(self) -> None:
        self.now += self.draw(st.sampled_from([0.5, 3.0, 6.0]))

    def forget(self, reader: bytes) -> None:
        self.wants.pop(reader, None)
        self.reading = {key: what for key, what in self.reading.items() if key[0] != reader}

    def fills(self, ref: VersionRef, bucket: int, slot: int) -> None:
        assert bucket < self.buckets[ref] and slot < NUM_SLOTS
        assert not [key for key in self.reading if key[1] == slot], "a slot is written while it is read"

    def check(self, reader: bytes, message: Message) -> bool:
        match message:
            case IpcBufferFilled(ref, bucket, slot):
                assert self.wants.get(reader) == ref
                assert bucket == self.got[reader], "buckets come in order, each once"
                self.got[reader] += 1
                self.reading[reader, slot] = (ref, bucket)
            case IpcBufferEnd(ref):
                assert self.wants.get(reader) == ref
                self.forget(reader)
        return True


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_steps=st.integers(1, 40))
def test_every_history_ends_with_each_reader_served_or_told_why_not(data, num_steps):
    history = History(data, num_steps)

    history.run()

    assert not history.wants
