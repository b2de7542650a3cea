"""A real hub that asks for keys: who gets in, who does not, and what each of them is told."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import pytest
import zmq

from streamrl.config.schema import Config
from streamrl.errors import WeightsError
from streamrl.messages import Announce, Stop, StopReason, Welcome
from streamrl.transport.client import HubClient
from streamrl.transport.keys import ActorKey, KeyDirectory, read_actor_key
from streamrl.transport.session import ActorSession
from streamrl.transport.sockets import actor_dealer
from streamrl.weights.pull.relay import Relay
from streamrl.weights.transport import WeightSource
from tests.unit.config.setting_harness import LiveHub, Peer, config_of, tiny_model

pytestmark = pytest.mark.timeout(60)
SHORT_MS = 1_500


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def keys(tmp_path) -> KeyDirectory:
    return KeyDirectory.create(tmp_path / "keys")


def key_of(keys: KeyDirectory, name: str) -> ActorKey:
    return read_actor_key(keys.add(name))


def source_of(hub: LiveHub, welcome: Welcome, key: ActorKey | None) -> WeightSource:
    """An actor of another machine, as far as weights go."""
    return WeightSource(
        hub.context, pull_token=welcome.pull_token, limits=welcome.limits, transports=["zmq"], key=key,
    )


def with_keys(keys: KeyDirectory, *words: str) -> Config:
    return config_of(f"hub.keys={keys.path}", *words)


def test_an_actor_with_a_key_joins_and_pulls_weights(tmp_path, keys, model_dir):
    key = key_of(keys, "box")
    with LiveHub(tmp_path, with_keys(keys)) as hub:
        hub.publish(0, model_dir)
        welcome = hub.connect(key).join("box-1")
        source = source_of(hub, welcome, key)
        fetched = source.fetch(welcome.manifest, welcome.offers, welcome.layout)
        assert fetched.document.manifest == welcome.manifest

        plain = source_of(hub, welcome, None)
        with pytest.raises(WeightsError):  # the token alone opens nothing
            plain.fetch(welcome.manifest, welcome.offers, welcome.layout, deadline_s=1.5)


@pytest.mark.shows("hub.keys", "actors.key")
def test_others_get_no_answer(tmp_path, keys, model_dir):
    other = KeyDirectory.create(tmp_path / "other")
    unknown, of_another_hub = ActorKey("box", key_of(other, "box").pair, keys.hub().public), key_of(other, "x")
    with LiveHub(tmp_path, with_keys(keys)) as hub:
        hub.publish(0, model_dir)
        peers = {(peer := hub.connect(key))._socket: peer for key in (None, unknown, of_another_hub)}
        writable, readable = zmq.Poller(), zmq.Poller()
        for one in peers:
            writable.register(one, zmq.POLLOUT)
            readable.register(one, zmq.POLLIN)
        for one, _ in writable.poll(SHORT_MS):  # without a handshake not even that
            peers[one].hello("box")
        assert readable.poll(SHORT_MS) == []


def test_an_actor_with_a_key_does_not_talk_to_a_hub_without_it(tmp_path, keys, model_dir):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, model_dir)
        assert not hub.connect(key_of(keys, "box"))._socket.poll(SHORT_MS, zmq.POLLOUT)


def test_a_key_allows_only_its_own_names(tmp_path, keys, model_dir):
    key = key_of(keys, "box")
    with LiveHub(tmp_path, with_keys(keys)) as hub:
        hub.publish(0, model_dir)
        peer = hub.connect(key)
        peer.hello("other")
        stop = peer.receive(Stop)
        assert stop.reason == StopReason.AUTH
        assert not stop.rejoin
        assert "box-" in stop.detail


def test_a_removed_key_ends_its_connection_and_a_new_one_gets_in_while_the_hub_runs(tmp_path, keys, model_dir):
    first, second = key_of(keys, "first"), key_of(keys, "second")
    with LiveHub(tmp_path, with_keys(keys)) as hub:
        hub.publish(0, model_dir)
        gone, stays = hub.connect(first), hub.connect(second)
        welcome = gone.join("first")
        stays.join("second")
        keys.remove("first")
        assert gone.receive(Stop).reason == StopReason.AUTH
        assert not hub.connect(first)._socket.poll(SHORT_MS, zmq.POLLOUT)
        hub.publish(1, model_dir)
        assert stays.receive(Announce).manifest.ref.version == 1
        gone.hello("first")  # the connection itself is still open
        assert gone.receive(Stop).reason == StopReason.AUTH
        source = source_of(hub, welcome, first)
        with pytest.raises(WeightsError):
            source.fetch(welcome.manifest, welcome.offers, welcome.layout, deadline_s=1.5)
        hub.connect(key_of(keys, "third")).join("third")


def test_a_directory_that_vanishes_for_a_moment_evicts_no_actor(tmp_path, keys, model_dir):
    key = key_of(keys, "box")
    with LiveHub(tmp_path, with_keys(keys)) as hub:
        hub.publish(0, model_dir)
        peer = hub.connect(key)
        peer.join("box")
        authenticator = hub.server._authenticator
        allowed = keys.path / "allowed"
        allowed.rename(keys.path / "moved")
        assert not authenticator.reload()
        assert not authenticator.callback("", b"unknown")
        assert authenticator.names() == {"box"}
        (keys.path / "moved").rename(allowed)
        hub.publish(1, model_dir)
        assert peer.receive(Announce).manifest.ref.version == 1


def test_nothing_readable_passes_over_the_wire(tmp_path, keys, model_dir):
    """What a machine between the two sees of a session holds none of what a session says."""
    key = key_of(keys, "box")
    with LiveHub(tmp_path, with_keys(keys)) as hub, RecordingProxy(hub.server.endpoint) as proxy:
        hub.publish(0, model_dir)
        welcome = Peer(actor_dealer(hub.context, proxy.endpoint, key=key)).join("box-secret-name")
        assert len(proxy.seen) > 1000
        for word in (b"box-secret-name", welcome.pull_token, b"quickstart", welcome.run_id.encode() * 2):
            assert word not in bytes(proxy.seen)


def test_an_actor_is_told_why_it_gets_no_connection(tmp_path, keys, model_dir, caplog):
    other = KeyDirectory.create(tmp_path / "other")
    unknown = ActorKey("box", key_of(other, "box").pair, keys.hub().public)
    with LiveHub(tmp_path, with_keys(keys)) as hub, caplog.at_level(logging.WARNING):
        hub.publish(0, model_dir)
        at_hub = "connections refused because their keys are not allowed"
        for key, told in ((None, ["streamrl keys add"]), (unknown, ["streamrl keys list", at_hub])):
            asyncio.run(refused(hub.server.endpoint, key, lambda told=told: all(one in caplog.text for one in told)))


async def refused(endpoint: str, key: ActorKey | None, until) -> None:
    session = ActorSession("box", 1, engine="test", max_leases=1, transports=("zmq",), software="test", random_seed=1)
    client = HubClient(endpoint, session, key)
    client.start()
    try:
        while not until():
            await asyncio.sleep(0.02)
    finally:
        client.close()


def test_an_actor_that_was_refused_joins_once_its_key_is_added(tmp_path, keys, model_dir, caplog):
    key = key_of(keys, "box")
    public = keys.path / "allowed" / "box.pub"
    text = public.read_text()
    public.unlink()
    with LiveHub(tmp_path, with_keys(keys)) as hub, caplog.at_level(logging.INFO):
        hub.publish(0, model_dir)

        def until() -> bool:
            if "streamrl keys list" in caplog.text and not public.exists():
                public.write_text(text)
            return "actor box joined" in caplog.text

        asyncio.run(refused(hub.server.endpoint, key, until))


def test_a_relay_with_a_key_serves_encrypted(tmp_path, keys, model_dir):
    key = key_of(keys, "box")
    with LiveHub(tmp_path, with_keys(keys)) as hub:
        hub.publish(0, model_dir)
        welcome = hub.connect(key).join("box-1")
        started, loops = threading.Event(), []

        async def live() -> None:
            relay = Relay(hub.server.endpoint, "tcp://127.0.0.1:0", key)
            del relay.source.factories["shm"]
            loops.extend([asyncio.get_running_loop(), relay])
            started.set()
            await relay.run()

        thread = threading.Thread(target=lambda: asyncio.run(live()))
        thread.start()
        assert started.wait(20)
        loop, relay = loops
        try:
            source = source_of(hub, welcome, key)
            source.relay = relay.endpoint
            assert "#" in relay.endpoint
            fetched = source.fetch(welcome.manifest, welcome.offers, welcome.layout)
            assert fetched.document.manifest == welcome.manifest
            assert relay.socket.num_bytes_served > 0
        finally:
            loop.call_soon_threadsafe(relay.leave, "the test is over")
            thread.join(timeout=30)
        assert not thread.is_alive()


class RecordingProxy:
    """Passes bytes on between one client and the hub, and keeps what it saw."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target, self.seen = (host, int(port)), bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> RecordingProxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def _serve(self) -> None:
        client, _ = self._server.accept()
        hub = socket.create_connection(self._target)
        for a, b in ((client, hub), (hub, client)):
            threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
        except OSError:
            pass

    def __exit__(self, *_: object) -> None:
        self._server.close()
