from __future__ import annotations

import threading
import time

import msgspec
import pytest
import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import Limits, Offer
from streamrl.weights.assets import pack_assets, unpack_assets
from streamrl.weights.document import NotAvailable, VersionRetired
from streamrl.weights.manifest import bucket_digest, make_layout, make_manifest
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.pull.client import ZmqReceiver
from streamrl.weights.shm.transport import shm_offer
from streamrl.weights.transport import WeightSource, receive


@pytest.fixture
def version(publish, layout, token):
    """(ChunkServer, manifest, body) of one published version."""
    manifest, path, body = publish(layout, 1)
    server = ChunkServer(pull_token=token)
    server.add(manifest, path, layout)
    return server, manifest, body


@pytest.fixture
def pull(context, token, limits, layout):
    """pull(endpoint, manifest) -> (body, receiver)."""

    def fetch(endpoint, manifest, *, layout=layout, limits=limits, token=token, cancelled=None, deadline_s=20.0):
        receiver = ZmqReceiver(endpoint, context, pull_token=token, limits=limits)
        document = receive(
            receiver, manifest, layout, cancelled=cancelled or threading.Event(),
            deadline=time.monotonic() + deadline_s,
        ).document
        document.tensors()
        return bytes(memoryview(document._body)), receiver

    return fetch


def test_a_lie_with_a_matching_chunk_digest_is_caught_by_the_bucket(version, serve, pull):
    server, manifest, body = version

    def tamper(count, chunk, payload):
        if count != 7:
            return chunk, payload
        lie = bytes(len(payload))
        return msgspec.structs.replace(chunk, digest=xxhash.xxh3_64_intdigest(lie)), lie

    received, receiver = pull(serve(server, tamper).endpoint, manifest)

    assert received == body and receiver.stats.refused_buckets == 1


def test_a_wire_that_flips_bytes_and_cuts_the_connection_only_delays(publish, token, serve, pull, faulty_wire):
    layout = make_layout([("w", "float32", (500_000,))], 300_000)
    manifest, path, body = publish(layout, 1)
    server = ChunkServer(pull_token=token)
    server.add(manifest, path, layout)
    router = serve(server)
    # A window of 400,000 bytes lies between the flip and the first cut: what has not arrived cannot be cut off.
    wire = faulty_wire(router.port, flip_at=(150_000,), cut_at=(700_000, 1_500_000))
    limits = Limits(chunk_bytes=100_000, pull_window=4, chunk_timeout_s=1.0)

    received, receiver = pull(wire.endpoint, manifest, layout=layout, limits=limits)

    assert received == body
    assert (wire.flipped, wire.cut, receiver.stats.refused_chunks) == (1, 2, 1)
    # Resumed, not restarted: the two cuts cost at most two windows.
    assert router.answered <= 20 + 1 + 2 * limits.pull_window


def test_a_retired_version_is_gone_and_the_next_manifest_leads_to_bytes(version, publish, layout, serve, pull):
    server, manifest, _ = version
    endpoint = serve(server).endpoint
    newer, path, body = publish(layout, 2)
    server.retire(manifest.ref)
    server.add(newer, path, layout)

    with pytest.raises(VersionRetired, match="version 1:1 was retired"):
        pull(endpoint, manifest)

    assert pull(endpoint, newer)[0] == body


def test_a_pull_that_cannot_be_answered_costs_the_hub_a_counter_only(version, serve, pull):
    server, manifest, body = version
    router = serve(server)
    wide = make_layout([("w", "uint8", (1888,))], 944)

    with pytest.raises(NotAvailable, match="nothing came"):
        forged = make_manifest(wide, manifest.ref, None, [bytes(16)] * 2)
        pull(router.endpoint, forged, layout=wide, limits=Limits(chunk_bytes=944, chunk_timeout_s=0.1))

    assert router.refused > 0 and pull(router.endpoint, manifest)[0] == body


def test_a_dead_endpoint_ends_after_three_silences_and_a_slow_one_at_the_deadline(version, serve, pull):
    server, manifest, _ = version
    router = serve(ChunkServer(pull_token=bytes(16)), lambda count, chunk, payload: None)

    with pytest.raises(NotAvailable, match="3 x 0.1 s, 0 of 5 buckets"):
        pull("tcp://127.0.0.1:9", manifest, limits=Limits(chunk_timeout_s=0.1))
    with pytest.raises(NotAvailable, match="not complete in time, 0 of 5 buckets came"):
        pull(router.endpoint, manifest, limits=Limits(chunk_timeout_s=60.0), deadline_s=0.2)


def test_a_capped_hub_is_slow_but_complete(publish, layout, token, serve, pull):
    manifest, path, body = publish(layout, 1)
    server = ChunkServer(pull_token=token, max_chunk_bytes=64, bytes_per_s=8000.0)
    server.add(manifest, path, layout)

    received, receiver = pull(serve(server).endpoint, manifest)

    assert received == body and receiver.stats.busy > 0


def test_assets_travel_by_the_same_socket(context, token, limits, serve, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}' * 100)
    assets = pack_assets(tmp_path)
    router = serve(ChunkServer(pull_token=token, assets=assets))
    source = WeightSource(context, pull_token=token, limits=limits)

    offers = [Offer("zmq", router.endpoint, len(assets))]
    received = source.fetch_assets(offers, len(assets), bucket_digest(assets), deadline_s=20)
    unpack_assets(received, tmp_path / "copy")

    assert (tmp_path / "copy" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    with pytest.raises(WeightsError, match="bucket 0 of 1"):
        source.fetch_assets(offers, len(assets), bytes(16), deadline_s=20)
    with pytest.raises(WeightsError, match="bytes of assets"):
        source.fetch_assets(offers, 1 << 40, bytes(16))


@pytest.fixture
def both(version, publish, layout, shm, serve, context, token, limits):
    """(WeightSource, manifest, shm offer, zmq offer, body)."""
    server, manifest, body = version
    path = shm.directory / "w.1.1"
    offer = Offer("zmq", serve(server).endpoint, len(body))
    return WeightSource(context, pull_token=token, limits=limits), manifest, shm_offer(path), offer, body


@pytest.mark.parametrize("change", [{"probe": bytes(16)}, {"name": "/gone/w.1.1"}])
def test_what_is_not_proven_falls_through_to_the_next_offer(change, both, layout):
    source, manifest, shm, zmq, body = both

    assert source.fetch(manifest, [shm, zmq], layout).source.name == "SHM"
    fetched = source.fetch(manifest, [msgspec.structs.replace(shm, **change), zmq], layout)

    assert fetched.source.name == "ZMQ" and bytes(memoryview(fetched.document._body)) == body


def test_a_damaged_file_falls_through_loudly(both, layout, caplog):
    source, manifest, shm, zmq, body = both
    with open(shm.name, "r+b") as file:
        file.seek(100)
        file.write(b"\xee")
        file.flush()
        with pytest.raises(WeightsError, match="shm: bucket 0 of 5 .*"):
            source.fetch(manifest, [shm], layout)

    assert "refused from shm: bucket 0 of 5" in caplog.text


def test_when_no_offer_works_the_error_says_why_for_each(both, layout):
    source, manifest, shm, zmq, _ = both
    gone, nowhere = msgspec.structs.replace(shm, name="/gone"), msgspec.structs.replace(zmq, name="no")
    broken = [Offer("nccl", "x", 1), gone, nowhere]

    with pytest.raises(WeightsError, match="nccl: unsupported transport; shm: .*/gone.*; zmq: .*"):
        source.fetch(manifest, broken, layout)
    with pytest.raises(WeightsError, match="the hub made no offer"):
        source.fetch(manifest, [], layout)
