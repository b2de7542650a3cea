"""A relay between a real hub and real pullers: the hub sends each version once, however many stand behind the relay."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
import zmq

from streamrl.errors import ConfigError, WeightsError
from streamrl.messages import (
    Announce,
    ChunkStatus,
    InstallSource,
    Limits,
    Manifest,
    Pull,
    PullMode,
    VersionRef,
    Welcome,
)
from streamrl.weights import transport as source_module
from streamrl.weights.manifest import bucket_digest, make_layout, make_manifest
from streamrl.weights.pull import plan as pull_plan
from streamrl.weights.pull import relay_chunks
from streamrl.weights.pull.relay import Relay, read_words
from streamrl.weights.pull.relay_chunks import MAX_ASKED, STALLED_S, InFlightVersions, RelayChunks
from streamrl.weights.transport import WeightSource
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model

pytestmark = pytest.mark.timeout(300)
NUM_VERSIONS = 3
ANY = "tcp://127.0.0.1:0"
TEN_BYTES = make_layout([("w", "uint8", (10,))], 10)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What is measured in seconds elsewhere must not depend on how busy this machine is."""
    monkeypatch.setattr(relay_chunks, "WAIT_FOR_ANNOUNCE_S", 30.0)
    monkeypatch.setattr(source_module, "RELAY_SILENT_S", 5.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return [tiny_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(3)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], object]) -> None:
    """Look again and again; the test's own time limit ends it."""
    while not condition():
        threading.Event().wait(0.01)


class Running:
    """A relay in a thread of its own, that cannot see the learner's shared memory."""

    def __init__(self, learner: str) -> None:
        self._started = threading.Event()
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(learner)), name="relay")
        self._thread.start()
        assert self._started.wait(200)

    async def _live(self, learner: str) -> None:
        self.loop, self.relay = asyncio.get_running_loop(), Relay(learner, ANY)
        del self.relay.source.factories["shm"]
        self._started.set()
        self.exit_code = await self.relay.run()

    @property
    def endpoint(self) -> str:
        return self.relay.endpoint

    def join(self) -> int | None:
        self._thread.join(timeout=200)
        assert not self._thread.is_alive()
        return self.exit_code

    def leave(self) -> int | None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.relay.leave, "the test is over")
        return self.join()


@contextmanager
def relay_of(hub: LiveHub) -> Iterator[Running]:
    running = Running(hub.server.endpoint)
    try:
        yield running
    finally:
        running.leave()


def puller(hub: LiveHub, welcome: Welcome, relay: str | None) -> WeightSource:
    """An actor on another host, as far as weights go."""
    one = WeightSource(hub.context, pull_token=welcome.pull_token, limits=welcome.limits)
    del one.factories["shm"]
    one.relay = relay
    return one


def served(hub: LiveHub) -> int:
    return hub.server.context.weights.socket.num_bytes_served


def change(hub: LiveHub) -> None:
    """Other weights for the next version."""
    with torch.no_grad():
        for _, parameter in hub._publisher._tensors:
            parameter.mul_(1.01)


@pytest.mark.parametrize(("num_actors", "num_relays"), [(1, 1), (4, 1), (6, 2)])
def test_the_learner_sends_every_version_once_a_relay_however_many_actors_pull_it(
    tmp_path, models, num_actors, num_relays
):
    with LiveHub(tmp_path, config_of("publish.delta_max_ratio=0")) as hub, ExitStack() as stack:
        hub.publish(0, models[0])
        peer = hub.connect()
        welcome = peer.join()
        relays = [stack.enter_context(relay_of(hub)) for _ in range(num_relays)]
        threads = stack.enter_context(ThreadPoolExecutor(num_actors))
        actors = [puller(hub, welcome, relays[number % num_relays].endpoint) for number in range(num_actors)]
        news = (welcome.manifest, welcome.offers)
        for version in range(NUM_VERSIONS):
            if version:
                change(hub)
                hub.publish(version, models[0])
                announce = peer.receive(Announce)
                news = (announce.manifest, announce.offers)
            fetched = list(threads.map(lambda one, news=news: one.fetch(*news, welcome.layout), actors))
            assert all(one.document.manifest == news[0] and one.source == InstallSource.ZMQ for one in fetched)
        assets = list(threads.map(
            lambda one: one.fetch_assets(welcome.offers, welcome.assets_nbytes, welcome.assets_digest), actors
        ))

        assert {xxhash.xxh3_128_digest(one) for one in assets} == {welcome.assets_digest}
        once = NUM_VERSIONS * sum(welcome.layout.bucket_bytes) + welcome.assets_nbytes
        assert served(hub) == num_relays * once
        relayed = [one.relay.socket.num_bytes_served for one in relays]
        assert relayed == [num_actors // num_relays * once] * num_relays


def test_deltas_go_through_a_relay_on_both_its_sides(tmp_path, models):
    with LiveHub(tmp_path, config_of("publish.delta_max_ratio=0.5")) as hub:
        hub.publish(0, models[0])
        peer = hub.connect()
        welcome = peer.join()
        with relay_of(hub) as relay:
            one = puller(hub, welcome, relay.endpoint)
            one.fetch(welcome.manifest, welcome.offers, welcome.layout)
            before, relayed = served(hub), relay.relay.socket.num_bytes_served
            with torch.no_grad():
                hub._publisher._tensors[0][1].view(-1)[5] += 1
            hub.publish(1, models[0])
            announce = peer.receive(Announce)
            fetched = one.fetch(announce.manifest, announce.offers, welcome.layout)

        small = sum(welcome.layout.bucket_bytes) // 2
        assert fetched.source == InstallSource.ZMQ_DELTA and fetched.document.manifest == announce.manifest
        assert 0 < served(hub) - before < small and 0 < relay.relay.socket.num_bytes_served - relayed < small


def test_the_same_weights_under_a_new_number_need_no_transfer_to_the_relay(tmp_path, models):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, models[0])
        peer = hub.connect()
        welcome = peer.join()
        with relay_of(hub) as relay:
            one = puller(hub, welcome, relay.endpoint)
            first = one.fetch(welcome.manifest, welcome.offers, welcome.layout)
            before = served(hub)
            hub.publish(1, models[0])
            announce = peer.receive(Announce)
            second = one.fetch(announce.manifest, announce.offers, welcome.layout)

        assert served(hub) == before
        assert second.document.view(0, second.document.nbytes) == first.document.view(0, first.document.nbytes)


def test_a_version_is_waited_for_while_the_relay_brings_it_and_refused_once_nothing_comes():
    clock, coming = [0.0], [False]
    chunks = RelayChunks(b"t" * 16, Limits(), in_flight=lambda what: coming[0], clock=lambda: clock[0])

    def status(token: bytes = b"t" * 16, mode: PullMode = PullMode.FULL) -> ChunkStatus:
        return chunks.answer(Pull(token, VersionRef(1, 5), mode, 0, 0, 10))[0].status

    assert status() == status(mode=PullMode.DELTA) == ChunkStatus.BUSY, "its announcement may still be on its way"
    assert status(mode=PullMode.ASSETS) == ChunkStatus.BUSY
    clock[0] = relay_chunks.WAIT_FOR_ANNOUNCE_S + 1
    assert status() == ChunkStatus.GONE, "the actor asks the learner"
    coming[0] = True
    assert status() == ChunkStatus.BUSY and status(b"x" * 16) == ChunkStatus.DENIED
    assert status(mode=PullMode.ASSETS) == ChunkStatus.BUSY
    chunks.put_assets(b"0123456789")
    assert status(mode=PullMode.ASSETS) == ChunkStatus.OK
    chunks.add_bytes(manifest_of(VersionRef(1, 5)), memoryview(bytes(10)), TEN_BYTES)
    coming[0] = False
    assert status() == ChunkStatus.OK
    chunks.add_bytes(manifest_of(VersionRef(1, 6)), memoryview(bytes(10)), TEN_BYTES)
    chunks.add_bytes(manifest_of(VersionRef(1, 7)), memoryview(bytes(10)), TEN_BYTES)
    assert status() == ChunkStatus.GONE, "retired"


def test_questions_for_several_things_that_do_not_come_are_all_answered_with_gone():
    clock = [0.0]
    chunks = RelayChunks(b"t" * 16, Limits(), in_flight=lambda what: False, clock=lambda: clock[0])

    def status(version: int) -> ChunkStatus:
        pull = Pull(b"t" * 16, VersionRef(1, version), PullMode.FULL, 0, 0, 10)
        return chunks.answer(pull)[0].status

    assert [status(5), status(6)] == [ChunkStatus.BUSY] * 2
    clock[0] = relay_chunks.WAIT_FOR_ANNOUNCE_S + 1
    assert [status(5), status(6), status(5), status(6)] == [ChunkStatus.GONE] * 4
    for version in range(7, 7 + 3 * MAX_ASKED):
        status(version)
    assert len(chunks._first_asked) == MAX_ASKED


class Line:
    """A puller at work, as the relay looks at it."""

    def __init__(self, waiting_since: float | None, moved_bytes: int = 0) -> None:
        self.waiting_since, self.moved_bytes = waiting_since, moved_bytes


def test_only_what_is_fetched_or_comes_next_is_coming_and_only_while_the_learner_is_heard():
    clock, line, v5, v6 = [100.0], [None], VersionRef(1, 5), VersionRef(1, 6)
    coming = InFlightVersions(lambda: line[0], clock=lambda: clock[0])
    assert not coming(None) and not coming(v5)

    coming.begin(v5)
    assert coming(None) and coming(v5) and not coming(v6)
    coming.add(v6)
    assert coming(v6)
    line[0] = Line(waiting_since=clock[0])
    clock[0] += STALLED_S
    assert coming(v5)
    clock[0] += 0.1
    assert not coming(v5) and not coming(v6)
    line[0].waiting_since = None  # every byte is here, and is checked: that may take long
    assert coming(v5)

    coming.end(failed=False)
    assert not coming(v5)


def test_after_a_fetch_that_failed_the_next_one_is_believed_once_bytes_arrive():
    """Or a learner whose weights cannot be reached would keep actors waiting at every announcement."""
    clock, line, v5 = [100.0], [None], VersionRef(1, 5)
    coming = InFlightVersions(lambda: line[0], clock=lambda: clock[0])
    coming.begin(v5)
    coming.end(failed=True)
    coming.begin(v5)
    assert not coming(v5)
    line[0] = Line(waiting_since=clock[0])
    assert not coming(v5)
    line[0].moved_bytes = 1
    assert coming(v5)
    coming.end(failed=False)
    line[0] = None
    coming.begin(v5)
    assert coming(v5)


def test_a_relay_that_cannot_reach_the_learners_weights_sends_its_actors_there(tmp_path, models, monkeypatch):
    """Its fetch would go on for longer than this test may take."""
    monkeypatch.setattr(pull_plan.PullPlan, "MAX_SILENCES", 10**6)
    monkeypatch.setattr(relay_chunks, "WAIT_FOR_ANNOUNCE_S", 0.2)
    monkeypatch.setattr(relay_chunks, "STALLED_S", 0.5)
    with LiveHub(tmp_path, config_of("hub.advertise=127.0.0.77")) as hub:  # no listener: a port not forwarded
        hub.publish(0, models[0])
        welcome = hub.connect().join()
        with relay_of(hub) as relay:
            until(lambda: relay.relay.source.puller is not None)
            one = puller(hub, welcome, None)
            offers = [msgspec.structs.replace(welcome.offers[-1], name=relay.endpoint)]
            with pytest.raises(source_module.VersionRetired):
                one.fetch(welcome.manifest, offers, welcome.layout, deadline_s=200)
            with pytest.raises(source_module.VersionRetired):
                one.fetch_assets(offers, welcome.assets_nbytes, welcome.assets_digest, deadline_s=200)


@pytest.mark.parametrize("failure", [MemoryError(), OSError(28, "No space left on device"), ValueError("any other")])
def test_a_relay_whose_fetch_fails_sends_its_actors_on_and_brings_the_next_version(
    tmp_path, models, monkeypatch, failure
):
    monkeypatch.setattr(relay_chunks, "WAIT_FOR_ANNOUNCE_S", 0.2)
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, models[0])
        welcome = hub.connect().join()
        with relay_of(hub) as relay:
            until(lambda: relay.relay._document is not None)
            fetch, failed = relay.relay.source.fetch, threading.Event()

            def fail_once(*words, **options):
                monkeypatch.setattr(relay.relay.source, "fetch", fetch)
                failed.set()
                raise failure

            monkeypatch.setattr(relay.relay.source, "fetch", fail_once)
            change(hub)
            hub.publish(1, models[0])
            assert failed.wait(100)
            offers = [msgspec.structs.replace(welcome.offers[-1], name=relay.endpoint)]
            with pytest.raises(source_module.VersionRetired):
                puller(hub, welcome, None).fetch(relay.relay._newest[0], offers, welcome.layout, deadline_s=100)
            change(hub)
            hub.publish(2, models[0])
            until(lambda: relay.relay._document.manifest.ref.version == 2)


def manifest_of(ref: VersionRef) -> Manifest:
    return make_manifest(TEN_BYTES, ref, None, [bucket_digest(bytes(10))])


def test_only_actors_of_this_hub_are_served(tmp_path, models):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, models[0])
        welcome = hub.connect().join()
        with relay_of(hub) as relay:
            friend, outsider = (puller(hub, welcome, relay.endpoint) for _ in range(2))
            friend.fetch(welcome.manifest, welcome.offers, welcome.layout)
            before = relay.relay.socket.num_bytes_served
            outsider.pull_token = b"x" * 16
            with pytest.raises(WeightsError, match="token"):
                outsider.fetch(welcome.manifest, welcome.offers, welcome.layout)
            assert relay.relay.socket.num_bytes_served == before > 0


def test_an_actor_whose_relay_is_gone_pulls_from_the_learner_at_once(tmp_path, models):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, models[0])
        welcome = hub.connect().join()
        with relay_of(hub) as relay:
            one = puller(hub, welcome, relay.endpoint)
            one.fetch(welcome.manifest, welcome.offers, welcome.layout)
        before = served(hub)
        for _ in range(2):
            fetched = one.fetch(welcome.manifest, welcome.offers, welcome.layout)

        assert fetched.document.manifest == welcome.manifest
        assert served(hub) - before == 2 * sum(welcome.layout.bucket_bytes)
        assert not source_module.reachable(relay.endpoint)


def test_a_relay_that_takes_questions_and_never_answers_is_given_up_and_rested(tmp_path, models, monkeypatch):
    monkeypatch.setattr(source_module, "RELAY_SILENT_S", 0.1)
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, models[0])
        welcome = hub.connect().join()
        deaf = hub.context.socket(zmq.ROUTER)
        endpoint = f"tcp://127.0.0.1:{deaf.bind_to_random_port('tcp://127.0.0.1')}"
        one = puller(hub, welcome, endpoint)
        for _ in range(2):
            assert one.fetch(welcome.manifest, welcome.offers, welcome.layout).document.manifest == welcome.manifest
        num_asked = 0
        while deaf.poll(0):
            deaf.recv_multipart()
            num_asked += 1
        deaf.close(linger=0)

        assert 0 < num_asked <= 3 * welcome.limits.pull_window, "asked for the first version only"


def test_a_relay_may_start_first_and_serves_a_successor_of_its_hub(tmp_path, models):
    port = free_port()
    relay = Running(f"tcp://127.0.0.1:{port}")
    try:
        for epoch in (1, 2):
            (tmp_path / str(epoch)).mkdir()
            with LiveHub(tmp_path / str(epoch), config_of(f"hub.bind=tcp://127.0.0.1:{port}")) as hub:
                hub.publish(0, models[0])
                welcome = hub.connect().join()
                one = puller(hub, welcome, relay.endpoint)
                before = relay.relay.socket.num_bytes_served
                until(lambda hub=hub: any(link.max_leases == 0 for link in hub.server.context.connections.all()))
                one.fetch(welcome.manifest, welcome.offers, welcome.layout)
                assert relay.relay.socket.num_bytes_served - before == sum(welcome.layout.bucket_bytes)
                assert len(hub.server.context.connections) == 1, "a relay does not count as an actor"
    finally:
        relay.leave()


def test_the_relay_leaves_with_the_run(tmp_path, models):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, models[0])
        relay = Running(hub.server.endpoint)
        until(lambda: hub.server.context.connections.all())
        hub.link.shutdown("all steps are done", finished=True)
        assert relay.join() == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--learner=nothing is not a valid address"), (["--learner", "host:5"], "host:5 is not a valid address"),
        (["--learner"], "--learner needs a value"), (["--lerner", "tcp://h:5"], "no option '--lerner'"),
        (["--learner", "tcp://h:5", "--bind", "5602"], "--bind=5602 is not a valid address"),
        (["tcp://h:5"], "no option 'tcp://h:5'"),
        (["--learner", "tcp://h:5", "--bind", "tcp://0.0.0.0:5602"], "--bind=tcp://0.0.0.0:5602 is open"),
        (["--learner", "tcp://h:5", "--bind", "tcp://[::]:5602"], "--bind=tcp://[::]:5602 is open"),
        (["--learner", "tcp://h:5", "--bind", "tcp://10.0.0.7:5602"], "--bind=tcp://10.0.0.7:5602 is open"),
    ],
)
def test_wrong_words_are_named_and_the_usage_shown(words, says):
    with pytest.raises(ConfigError, match="(?s)" + re.escape(says) + ".*streamrl relay --learner"):
        read_words(words)


def test_the_words_may_be_written_both_ways():
    assert read_words(["--learner", "tcp://h:5", "--bind=tcp://localhost:7"]) == ("tcp://h:5", "tcp://localhost:7", "")
    assert read_words(["--learner=tcp://h:5"]) == ("tcp://h:5", "tcp://127.0.0.1:0", "")
