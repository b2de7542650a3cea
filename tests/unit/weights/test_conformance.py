"""The conformance suite against the transports of a host: shared memory and pull over ZeroMQ."""

from __future__ import annotations

import pytest

from streamrl.messages import InstallSource, VersionRef
from tests.unit.weights.conformance import TransportConformance, bytes_of, changed
from tests.unit.weights.host_wires import ShareWire, ShmWire, ZmqWire


class TestShm(TransportConformance):
    sources = {InstallSource.SHM}

    @pytest.fixture
    def wire(self, layout, tmp_path):
        wire = ShmWire(layout, tmp_path)
        yield wire
        wire.close()


class TestZmq(TransportConformance):
    sources = {InstallSource.ZMQ}

    @pytest.fixture
    def wire(self, layout, tmp_path):
        wire = ZmqWire(layout, tmp_path)
        yield wire
        wire.close()


class TestShareOfAHost(TransportConformance):
    sources = {InstallSource.ZMQ, InstallSource.SHM}

    @pytest.fixture
    def wire(self, layout, tmp_path):
        wire = ShareWire(layout, tmp_path)
        yield wire
        wire.close()


class TestZmqDelta(TransportConformance):
    """The ratio is what small buckets need: a header of 64 bytes for 400."""

    sources = {InstallSource.ZMQ, InstallSource.ZMQ_DELTA}

    @pytest.fixture
    def wire(self, layout, tmp_path):
        wire = ZmqWire(layout, tmp_path, delta_max_ratio=0.5)
        yield wire
        wire.close()

    def test_the_parent_in_hand_means_a_delta_and_anything_else_a_full_pull(self, wire, first):
        found, body = [wire.source], first[1]
        for version in (2, 3, 4, 5):
            body = changed(body, version)
            manifest = wire.publish(VersionRef(1, version), body)
            if version != 4:
                assert bytes_of(wire.receive(manifest)) == body
                found.append(wire.source)

        full, delta = InstallSource.ZMQ, InstallSource.ZMQ_DELTA
        assert found == [full, delta, delta, full]  # version 4 was skipped
