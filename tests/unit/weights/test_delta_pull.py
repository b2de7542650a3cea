"""Deltas over real sockets: when they are used, and what happens when anything about them is wrong."""

from __future__ import annotations

import logging

import msgspec
import pytest
import xxhash

from streamrl.errors import ContentError
from streamrl.messages import ChunkStatus, DeltaIndex, InstallSource, Pull, PullMode, VersionRef
from streamrl.weights.delta import INDEX_BUCKET, DeltaBase, DeltaStore, Served
from tests.unit.weights.conformance import body_of, bytes_of, changed
from tests.unit.weights.host_wires import TOKEN, ZmqWire

FULL, DELTA = InstallSource.ZMQ, InstallSource.ZMQ_DELTA


@pytest.fixture
def wire(layout, tmp_path):
    wire = ZmqWire(layout, tmp_path, delta_max_ratio=0.5)
    yield wire
    wire.close()


class Story:
    """Publishes version after version, each a little different, and fetches it."""

    def __init__(self, wire: ZmqWire) -> None:
        self.wire, self.body, self.version = wire, body_of(wire.layout, 1), 0

    def publish(self, body: bytes | None = None):
        self.version += 1
        self.body = body or changed(self.body, self.version)
        return self.wire.publish(VersionRef(1, self.version), self.body)

    def step(self, body: bytes | None = None) -> InstallSource:
        document = self.wire.receive(self.publish(body))
        assert bytes_of(document) == self.body
        assert self.wire.source is not None
        return self.wire.source


@pytest.fixture
def story(wire):
    return Story(wire)


def test_each_version_after_the_first_comes_as_a_delta_of_the_one_before(story):
    assert [story.step() for _ in range(20)] == [FULL] + 19 * [DELTA]


def test_a_delta_moves_fewer_bytes_than_the_document(story):
    story.step()
    story.step()

    assert story.wire.moved_bytes < len(story.body)


def test_when_most_has_changed_the_full_version_comes_and_deltas_go_on_later(story):
    found = [story.step(), story.step(), story.step(body_of(story.wire.layout, 99)), story.step()]

    assert found == [FULL, DELTA, FULL, DELTA]


def test_after_a_full_version_was_declined_the_hub_no_longer_offers_it(story):
    story.step()
    story.step(body_of(story.wire.layout, 99))

    assert story.wire.server.deltas.parent_of(VersionRef(1, 2)) is None


def lie_about(wire: ZmqWire, *, index: bool, times: int) -> None:
    """The first byte of bucket 2's delta (or of the index) is wrong so often, with a fitting chunk digest."""
    left = [times]

    def tamper(chunk, payload):
        hit = chunk.mode == PullMode.DELTA and chunk.status == ChunkStatus.OK and chunk.offset == 0
        if not hit or chunk.bucket != (INDEX_BUCKET if index else 2) or left[0] == 0:
            return chunk, payload
        left[0] -= 1
        payload = bytes([payload[0] ^ 1]) + payload[1:]
        return msgspec.structs.replace(chunk, digest=xxhash.xxh3_64_intdigest(payload)), payload

    wire.tamper = tamper


@pytest.mark.parametrize("index", [True, False])
def test_one_bad_delta_costs_a_full_pull_and_no_more(story, index, caplog):
    story.step()
    lie_about(story.wire, index=index, times=1 if index else 3)

    with caplog.at_level(logging.WARNING):
        found = [story.step(), story.step(), story.step()]

    assert found == [FULL, DELTA, DELTA]
    assert caplog.text.count("a delta failed, the full version is pulled") == 1


def test_a_payload_that_was_damaged_on_the_way_is_pulled_again(story):
    story.step()
    lie_about(story.wire, index=False, times=2)

    assert story.step() == DELTA


def test_two_bad_deltas_in_a_row_end_deltas_until_a_restart(story, caplog):
    story.step()
    lie_about(story.wire, index=True, times=2)

    with caplog.at_level(logging.WARNING):
        found = [story.step() for _ in range(4)]
    story.wire.join()
    found += [story.step(), story.step()]

    assert found == [FULL, FULL, FULL, FULL, FULL, DELTA]
    assert "only full versions are pulled until a restart" in caplog.text


def test_two_bad_deltas_with_a_good_one_between_are_forgiven(story):
    story.step()
    found = []
    for times in (1, 0, 1, 0):
        lie_about(story.wire, index=True, times=times)
        found.append(story.step())

    assert found == [FULL, DELTA, FULL, DELTA]


def test_a_delta_from_another_history_is_refused_as_a_wrong_base(story, caplog):
    """Same version number, other bytes: a run that was resumed elsewhere."""
    story.step()
    other = story.wire.impostor(body_of(story.wire.layout, 55))
    story.wire.delta_base = DeltaBase()
    story.wire.delta_base.keep(other)

    with caplog.at_level(logging.WARNING):
        assert story.step() == FULL

    assert "wrong base" in caplog.text


def test_a_base_that_was_written_to_is_noticed_and_replaced(story):
    story.step()
    held = story.wire.delta_base._document
    for tensor in held.tensors().values():
        tensor.mul_(1.5)

    assert [story.step(), story.step()] == [FULL, DELTA]


def test_an_older_document_never_replaces_a_newer_base(story):
    older = story.wire.receive(story.publish())
    newer = story.wire.receive(story.publish())

    story.wire.delta_base.keep(older)

    assert story.wire.delta_base._document is newer


# --- the store, without a socket --------------------------------------------------------------------------------------


def served(wire: ZmqWire, ref: VersionRef) -> Served:
    return wire.server._documents[ref]


def test_nothing_is_encoded_before_somebody_asks_and_then_always(story):
    store = DeltaStore(0.5)
    for version in (1, 2, 3):
        story.publish()
        old = served(story.wire, VersionRef(1, version - 1)) if version > 1 else None
        store.add(served(story.wire, VersionRef(1, version)), old, 4)
        if version == 2:
            assert store.parent_of(VersionRef(1, 2)) == VersionRef(1, 1) and store.next_job() is None
            assert store.find(Pull(TOKEN, VersionRef(1, 2), 1, INDEX_BUCKET, 0, 64)) is store.next_job()

    job = store.next_job()
    assert job is not None and job.parent == VersionRef(1, 2)
    while not job.finished:
        job.step()
    index = msgspec.msgpack.decode(bytes(job.source(INDEX_BUCKET)), type=DeltaIndex)
    assert [len(job.source(at)) for at in range(5)] == list(index.nbytes)
    with pytest.raises(ContentError, match="delta bucket 5, there are 5"):
        job.source(5)


def test_without_a_ratio_or_a_parent_there_is_no_delta(story):
    story.publish(), story.publish()
    first, second = (served(story.wire, VersionRef(1, version)) for version in (1, 2))
    never, always = DeltaStore(0.0), DeltaStore(0.5)
    never.add(second, first, 4)
    always.add(second, None, 4)

    assert never.parent_of(VersionRef(1, 2)) is None and always.parent_of(VersionRef(1, 2)) is None
