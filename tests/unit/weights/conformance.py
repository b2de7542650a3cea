"""What every transport of weights must do: one suite, run against each of them.

To plug a transport in, write a `Wire` (both of its ends, and hands that can hurt it) and a subclass of
`TransportConformance` with a `wire` fixture; pytest then runs every test of this file against it:

    class TestCarrierPigeon(TransportConformance):
        sources = {InstallSource.PIGEON}            # what a receive may report

        @pytest.fixture
        def wire(self, layout, tmp_path):
            wire = PigeonWire(layout, tmp_path)
            yield wire
            wire.close()

A `Wire` may be as real as the machine allows (shm, zmq) or play its network in memory (a communicator of threads).
`host_wires.py` holds the ones for shm, zmq and zmq with deltas; copy the nearest. The suite needs no timing from
a transport but one promise: a receive ends by its deadline, give or take `Wire.patience_s`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import pytest

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, VersionRef
from streamrl.weights.document import Document, Superseded
from streamrl.weights.gpu.device_document import DeviceDocument
from streamrl.weights.manifest import document_nbytes, make_layout, root_of

SPECS = (
    ("embed", "float32", (33, 5)), ("scale", "float32", ()), ("mlp.up", "float32", (7, 41)), ("norm", "float32", (19,)),
)


class Wire(Protocol):
    """One transport: a publisher, a receiver, and what can happen between them.

    Attributes:
        layout: of every document on it.
        source: how the last successful `receive` came, as INSTALLED would report it; None before.
        patience_s: how much later than its deadline a receive may end.
    """

    layout: Layout
    source: InstallSource | None
    patience_s: float

    def publish(self, ref: VersionRef, body: bytes) -> Manifest:
        """Make `body` available as version `ref`, its parent being the last one published; at least the newest two
        stay available."""
        ...

    def receive(
        self, manifest: Manifest, *, layout: Layout | None = None, cancelled: threading.Event | None = None,
        deadline_s: float = 20.0,
    ) -> Document:
        """One fetch, by a receiver that still holds what it received before on this wire (a delta needs that).

        `layout`: what the receiver believes, if not the wire's own. Raises WeightsError and its kin, nothing else.
        """
        ...

    def join(self) -> None:
        """From now on `receive` is by a receiver that has never received anything."""
        ...

    def midway(self, action: Callable[[], None]) -> None:
        """Run `action` once, while the next transfer is on its way (for a mapping: between opening and verifying)."""
        ...

    def flip(self, offset: int) -> None:
        """Byte `offset` of the newest document (of its encoded form, if there is one) is wrong at every receiver from
        now on, however often it is asked for; versions published later are whole."""
        ...

    def tear(self, ref: VersionRef, body: bytes) -> Manifest:
        """A writer that dies halfway through `body`: nothing more comes. Returns the manifest of a whole one."""
        ...

    def die(self) -> None:
        """The source ends at once, as after kill -9, without a shutdown message."""
        ...

    def close(self) -> None: ...


def body_of(layout: Layout, seed: int) -> bytes:
    """Random bytes of the document's size."""
    return random.Random(seed).randbytes(document_nbytes(layout))


def changed(body: bytes, seed: int, *, every: int = 100) -> bytes:
    """The same with about one in `every` 4-byte words different: what an optimizer step may leave of it."""
    rng, new = random.Random(seed), bytearray(body)
    for _ in range(max(1, len(body) // 4 // every)):
        at = 4 * rng.randrange(len(body) // 4)
        new[at : at + 4] = rng.randbytes(4)
    return bytes(new)


def bytes_of(document: Document | DeviceDocument) -> bytes:
    """All bytes; raises if the document was not verified."""
    document.tensors()
    if isinstance(document, DeviceDocument):
        return document._buffer.cpu().numpy().tobytes()
    return bytes(memoryview(document._body))


class TransportConformance:
    """The suite. `sources` are the InstallSource values that a receive over this wire may report."""

    sources: set[InstallSource] = set()

    @pytest.fixture
    def layout(self) -> Layout:
        """1,888 bytes in five buckets of at most 400; a tensor lies across buckets."""
        return make_layout(SPECS, bucket_bytes=400)

    @pytest.fixture
    def first(self, wire: Wire) -> tuple[Manifest, bytes, Document]:
        """A version that was published and received: its manifest, its bytes, and the receiver's document."""
        body = body_of(wire.layout, 1)
        manifest = wire.publish(VersionRef(1, 1), body)
        return manifest, body, wire.receive(manifest)

    def test_what_was_published_arrives_bit_for_bit_and_verified(self, wire, first):
        manifest, body, document = first

        assert bytes_of(document) == body
        assert document.manifest == manifest and wire.source in self.sources

    def test_the_names_that_arrive_are_exactly_the_names_of_the_layout(self, wire, first):
        tensors = first[2].tensors()

        assert list(tensors) == [spec.name for spec in wire.layout.tensors]
        assert [tuple(tensor.shape) for tensor in tensors.values()] == [spec.shape for spec in wire.layout.tensors]

    def test_version_after_version_arrives_and_some_may_be_skipped(self, wire, first):
        body = first[1]
        for version in range(2, 12):
            body = changed(body, version)
            manifest = wire.publish(VersionRef(1, version), body)
            if version % 4:
                assert bytes_of(wire.receive(manifest)) == body
                assert wire.source in self.sources

    def test_the_same_version_may_be_fetched_twice(self, wire, first):
        manifest, body, document = first

        assert bytes_of(wire.receive(manifest)) == body == bytes_of(document)

    def test_a_version_in_which_everything_changed_arrives(self, wire, first):
        body = body_of(wire.layout, 2)

        assert bytes_of(wire.receive(wire.publish(VersionRef(1, 2), body))) == body

    def test_a_version_in_which_nothing_changed_arrives_under_its_new_number(self, wire, first):
        manifest = wire.publish(VersionRef(1, 2), first[1])

        assert bytes_of(wire.receive(manifest)) == first[1] and manifest.root != first[0].root

    def test_a_writer_that_dies_halfway_publishes_nothing(self, wire, first):
        manifest, body, document = first
        torn = wire.tear(VersionRef(1, 2), changed(body, 2))

        with pytest.raises(WeightsError):
            wire.receive(torn, deadline_s=0.5)

        assert bytes_of(document) == body == bytes_of(wire.receive(manifest))

    def test_a_receiver_with_another_layout_refuses(self, wire, first):
        other = make_layout((*SPECS[:-1], ("bias", "float32", (19,))), bucket_bytes=400)

        with pytest.raises(WeightsError, match="layout"):
            wire.receive(first[0], layout=other)

    def test_a_manifest_that_was_tampered_with_is_refused(self, wire, first):
        manifest = msgspec.structs.replace(first[0], digests=(bytes(16), *first[0].digests[1:]))

        with pytest.raises(WeightsError, match="root"):
            wire.receive(manifest)

    def test_a_manifest_of_other_bytes_is_refused_and_the_bucket_named(self, wire, first):
        digests = (*first[0].digests[:3], bytes(16), first[0].digests[4])
        root = root_of(first[0].layout_digest, first[0].ref, first[0].digest_kind, digests)
        manifest = msgspec.structs.replace(first[0], digests=digests, root=root)
        wire.join()

        with pytest.raises(WeightsError, match="bucket 3 of 5"):
            wire.receive(manifest)

    @pytest.mark.parametrize("offset", [0, 399, 400, 1000, 1887])
    def test_a_flipped_byte_never_arrives_as_weights(self, wire, first, offset):
        body = changed(first[1], 3)
        manifest = wire.publish(VersionRef(1, 2), body)
        wire.flip(offset)

        try:
            document = wire.receive(manifest)
        except WeightsError:
            pass  # refused
        else:
            assert bytes_of(document) == body  # or brought in another way

        later = changed(body, 4)
        assert bytes_of(wire.receive(wire.publish(VersionRef(1, 3), later))) == later

    def test_a_newer_version_in_the_middle_of_a_fetch_takes_its_place(self, wire, first):
        body, newer = changed(first[1], 2), changed(first[1], 3)
        manifest, cancelled, found = wire.publish(VersionRef(1, 2), body), threading.Event(), []

        def announce() -> None:
            found.append(wire.publish(VersionRef(1, 3), newer))
            cancelled.set()

        wire.midway(announce)
        with pytest.raises(Superseded):
            wire.receive(manifest, cancelled=cancelled)

        assert bytes_of(first[2]) == first[1]
        assert bytes_of(wire.receive(found[0])) == newer

    def test_an_abandoned_fetch_leaves_the_old_version_as_it_was(self, wire, first):
        body, cancelled = changed(first[1], 2), threading.Event()
        manifest = wire.publish(VersionRef(1, 2), body)
        wire.midway(cancelled.set)

        with pytest.raises(Superseded):
            wire.receive(manifest, cancelled=cancelled)

        assert bytes_of(first[2]) == first[1]
        assert bytes_of(wire.receive(manifest)) == body  # the same one, when it is wanted after all

    def test_a_late_joiner_gets_the_newest_version_without_having_seen_any_before(self, wire, first):
        body = first[1]
        for version in range(2, 5):
            body = changed(body, version)
            manifest = wire.publish(VersionRef(1, version), body)
        wire.join()

        assert bytes_of(wire.receive(manifest)) == body

    def test_a_source_that_dies_in_the_middle_ends_the_fetch_and_nothing_else(self, wire, first):
        body = changed(first[1], 2)
        manifest = wire.publish(VersionRef(1, 2), body)
        wire.midway(wire.die)
        started = time.monotonic()

        try:
            document = wire.receive(manifest, deadline_s=2.0)
        except WeightsError:
            pass
        else:
            assert bytes_of(document) == body

        assert time.monotonic() - started < 2.0 + wire.patience_s
        assert bytes_of(first[2]) == first[1]

    def test_a_version_that_was_never_published_is_not_made_up(self, wire, first):
        digests = first[0].digests
        ref = VersionRef(1, 77)
        root = root_of(first[0].layout_digest, ref, first[0].digest_kind, digests)
        unpublished = msgspec.structs.replace(first[0], ref=ref, root=root)
        wire.join()

        with pytest.raises(WeightsError):
            wire.receive(unpublished, deadline_s=0.5)

    def test_a_deadline_that_has_passed_is_kept(self, wire, first):
        manifest = wire.publish(VersionRef(1, 2), changed(first[1], 2))
        started = time.monotonic()

        with pytest.raises(WeightsError):
            wire.receive(manifest, deadline_s=0.0)

        assert time.monotonic() - started < wire.patience_s
