from __future__ import annotations

import random

import msgspec
import pytest

from streamrl.errors import ContentError, WeightsError
from streamrl.messages import Chunk, ChunkStatus, Limits, Pull, PullMode, VersionRef
from streamrl.weights.document import NotAvailable, VersionRetired
from streamrl.weights.manifest import bucket_digest, bucket_ranges
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.pull.plan import Ask, PullPlan

LIMITS = Limits(chunk_bytes=64, pull_window=4, chunk_timeout_s=1.0)


def pull_of(ask: Ask, token: bytes, ref: VersionRef, mode: PullMode = PullMode.FULL) -> Pull:
    return Pull(token, ref, mode, ask.bucket, ask.offset, ask.length)


class Fetch:
    """A PullPlan over fresh memory, driven by hand."""

    def __init__(self, layout, manifest, limits: Limits = LIMITS) -> None:
        self.memory = bytearray(sum(layout.bucket_bytes))
        view = memoryview(self.memory)
        buckets = [view[start:end] for start, end in bucket_ranges(layout)]
        self.plan = PullPlan(buckets, manifest.digests, limits, what="version 1:1", now=0.0)

    def ask_all(self, now: float = 0.0) -> list[Ask]:
        asks = []
        while (ask := self.plan.next_ask(now)) is not None:
            self.plan.sent(ask)
            asks.append(ask)
        return asks


@pytest.fixture
def server(publish, layout, token):
    manifest, path, body = publish(layout, 1)
    server = ChunkServer(pull_token=token, assets=b"assets!", max_chunk_bytes=256)
    server.add(manifest, path, layout)
    return server, manifest, body


def test_the_server_gives_exactly_the_bytes_asked_for(server, token):
    served, _, body = server

    chunk, payload = served.answer(pull_of(Ask(2, 100, 200), token, VersionRef(1, 1)))

    assert bytes(payload) == body[900:1100]
    assert (chunk.status, chunk.total, chunk.length, chunk.offset, chunk.bucket) == (ChunkStatus.OK, 400, 200, 100, 2)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"pull_token": bytes(16)}, ChunkStatus.DENIED),
        ({"target": VersionRef(1, 0)}, ChunkStatus.GONE),
        ({"target": VersionRef(9, 9)}, ChunkStatus.GONE),
        ({"mode": PullMode.DELTA}, ChunkStatus.GONE),
        ({"mode": PullMode.ASSETS, "pull_token": bytes(16)}, ChunkStatus.DENIED),
    ],
)
def test_what_the_server_does_not_give_carries_no_bytes(change, status, server, token):
    pull = msgspec.structs.replace(pull_of(Ask(0, 0, 64), token, VersionRef(1, 1)), **change)

    chunk, payload = server[0].answer(pull)

    assert (chunk.status, len(payload), chunk.length) == (status, 0, 0)


@pytest.mark.parametrize(
    "ask", [Ask(5, 0, 1), Ask(0, 400, 1), Ask(0, 399, 2), Ask(0, 0, 0), Ask(0, 0, 257), Ask(4, 288, 1)]
)
def test_impossible_ranges_are_a_content_error_not_an_answer(ask, server, token):
    with pytest.raises(ContentError, match="PULL of") as caught:
        server[0].answer(pull_of(ask, token, VersionRef(1, 1)))

    assert caught.value.check == "pull_range"


def test_assets_are_one_bucket_under_any_version(server, token):
    chunk, payload = server[0].answer(pull_of(Ask(0, 2, 5), token, VersionRef(7, 7), PullMode.ASSETS))

    assert (bytes(payload), chunk.total, chunk.target) == (b"sets!", 7, VersionRef(7, 7))


def test_only_the_newest_versions_are_served_and_a_payload_on_its_way_survives_retirement(
    server, publish, layout, token
):
    served, _, body = server
    _, early = served.answer(pull_of(Ask(0, 0, 64), token, VersionRef(1, 1)))

    for version in (2, 3):
        manifest, path, _ = publish(layout, version)
        served.add(manifest, path, layout)

    statuses = [served.answer(pull_of(Ask(0, 0, 1), token, VersionRef(1, v)))[0].status for v in (1, 2, 3)]
    assert statuses == [ChunkStatus.GONE, ChunkStatus.OK, ChunkStatus.OK]
    served.retire(VersionRef(1, 3))
    assert served.answer(pull_of(Ask(0, 0, 1), token, VersionRef(1, 3)))[0].status == ChunkStatus.GONE
    assert bytes(early) == body[:64]


def test_a_document_of_another_version_is_not_served_under_this_name(publish, layout, token):
    _, path, _ = publish(layout, 1)
    newer, _, _ = publish(layout, 2)

    with pytest.raises(WeightsError, match="holds version 1:1"):
        ChunkServer(pull_token=token).add(newer, path, layout)


def test_the_bandwidth_cap_holds_over_time_and_says_when_to_come_back(publish, layout, token):
    now = 0.0
    server = ChunkServer(pull_token=token, max_chunk_bytes=100, bytes_per_s=1000.0, clock=lambda: now)
    manifest, path, _ = publish(layout, 1)
    server.add(manifest, path, layout)
    sent = 0

    while now < 10.0:
        chunk, payload = server.answer(pull_of(Ask(0, 0, 80), token, VersionRef(1, 1)))
        sent += len(payload)
        if chunk.status == ChunkStatus.BUSY:
            assert 0 < chunk.retry_after_s <= 0.08
            now += chunk.retry_after_s
        else:
            assert chunk.status == ChunkStatus.OK

    assert 9_900 <= sent <= 10_200


def test_the_plan_asks_for_every_byte_once_and_never_more_than_the_window(server, layout, token):
    served, manifest, body = server
    fetch = Fetch(layout, manifest)
    asked = []

    while not fetch.plan.done:
        asks = fetch.ask_all()
        assert 0 < len(asks) <= LIMITS.pull_window
        asked += asks
        for ask in asks:
            fetch.plan.accept(*served.answer(pull_of(ask, token, manifest.ref)), 0.0)

    assert bytes(fetch.memory) == body and len(set(asked)) == len(asked)
    assert sum(ask.length for ask in asked) == len(body)


def test_a_lossy_shuffling_duplicating_corrupting_wire_still_gives_the_document(server, layout, token):
    served, manifest, body = server
    for seed in range(150):
        rng = random.Random(seed)
        fetch, now, wire = Fetch(layout, manifest), 0.0, []
        while not fetch.plan.done:
            wire += [pull_of(ask, token, manifest.ref) for ask in fetch.ask_all(now)]
            wire = [pull for pull in wire if rng.random() > 0.1]
            if not wire:
                now += fetch.plan.next_event(now)
                fetch.plan.tick(now)
                continue
            pull = wire.pop(rng.randrange(len(wire)))
            wire += [pull] * (rng.random() < 0.1)
            chunk, payload = served.answer(pull)
            if rng.random() < 0.01:
                payload = memoryview(bytes(len(payload)))
            fetch.plan.accept(chunk, payload, now)
            now += 0.01
        assert bytes(fetch.memory) == body, f"seed {seed}"


def test_an_overtaken_pull_is_sent_again_at_once(server, layout, token):
    served, manifest, _ = server
    fetch = Fetch(layout, manifest)
    first, second, third, fourth = fetch.ask_all()

    fetch.plan.accept(*served.answer(pull_of(third, token, manifest.ref)), 0.1)

    assert fetch.ask_all(0.1)[:2] == [first, second]
    assert fetch.plan.stats.repeated_pulls == 2


def test_silence_repeats_the_window_and_the_third_silence_gives_up(server, layout):
    fetch = Fetch(layout, server[1])
    asks = fetch.ask_all()

    fetch.plan.tick(0.999)
    assert fetch.ask_all(0.999) == []
    for silence in (1.0, 2.0):
        fetch.plan.tick(silence)
        assert fetch.ask_all(silence) == asks
    with pytest.raises(NotAvailable, match="nothing came for 3 x 1 s, 0 of 5 buckets verified"):
        fetch.plan.tick(3.0)


def test_a_slow_link_that_keeps_talking_is_not_silent(server, layout, token):
    served, manifest, _ = server
    fetch, now = Fetch(layout, manifest), 0.0

    while not fetch.plan.done:
        for ask in fetch.ask_all(now):
            now += 0.9
            fetch.plan.tick(now)
            fetch.plan.accept(*served.answer(pull_of(ask, token, manifest.ref)), now)

    assert fetch.plan.stats.repeated_pulls == 0


def test_a_busy_hub_is_left_alone_as_long_as_it_asks(server, layout, token):
    fetch = Fetch(layout, server[1])
    asks = fetch.ask_all()

    for ask in asks:
        pull = pull_of(ask, token, server[1].ref)
        busy = Chunk(pull.target, pull.mode, pull.bucket, pull.offset, ChunkStatus.BUSY, 0.4, 400, 0, 0)
        fetch.plan.accept(busy, memoryview(b""), 0.0)

    assert fetch.ask_all(0.39) == [] and fetch.plan.next_event(0.0) == pytest.approx(0.4)
    assert sorted(fetch.ask_all(0.41), key=lambda ask: ask.offset) == asks


def test_a_bucket_that_stays_wrong_is_given_up_by_name(server, layout, token):
    served, manifest, _ = server
    digests = (*manifest.digests[:3], bytes(16), manifest.digests[4])
    fetch = Fetch(layout, msgspec.structs.replace(manifest, digests=digests))

    with pytest.raises(WeightsError, match="bucket 3 of 5 has digest .{8}, manifest says 00000000, 3 times"):
        while not fetch.plan.done:
            for ask in fetch.ask_all():
                fetch.plan.accept(*served.answer(pull_of(ask, token, manifest.ref)), 0.0)

    assert fetch.plan.stats.refused_buckets == 3


def test_gone_and_denied_end_the_fetch(server, layout, token):
    served, manifest, _ = server
    for change, error in (({"target": VersionRef(1, 0)}, VersionRetired), ({"pull_token": bytes(16)}, NotAvailable)):
        fetch = Fetch(layout, manifest)
        pull = msgspec.structs.replace(pull_of(fetch.ask_all()[0], token, manifest.ref), **change)
        with pytest.raises(error):
            fetch.plan.accept(*served.answer(pull), 0.0)


def test_assets_and_buckets_are_checked_with_the_same_digest():
    memory = bytearray(3)
    plan = PullPlan([memoryview(memory)], [bucket_digest(b"abc")], LIMITS, what="the assets", now=0.0)
    server = ChunkServer(pull_token=bytes(16), assets=b"abc")
    ask = plan.next_ask(0.0)
    assert ask is not None
    plan.sent(ask)

    plan.accept(*server.answer(pull_of(ask, bytes(16), VersionRef(0, 0), PullMode.ASSETS)), 0.0)

    assert plan.done and bytes(memory) == b"abc"
