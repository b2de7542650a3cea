"""A relay between a real hub and real pullers: the hub sends each version once, whoever stands behind the relay."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash

from streamrl.messages import Announce, InstallSource, Welcome
from streamrl.relay import Relay
from streamrl.weights.source import WeightSource
from tests.unit.setting_stage import LiveHub, config_of, tiny_model

pytestmark = pytest.mark.timeout(60)
NUM_VERSIONS = 3
ANY = "tcp://127.0.0.1:0"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return [tiny_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(3)]


class Running:
    """A relay in a thread of its own, that cannot see the learner's shared memory."""

    def __init__(self, learner: str) -> None:
        self._started = threading.Event()
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(learner)), name="relay")
        self._thread.start()
        assert self._started.wait(20)

    async def _live(self, learner: str) -> None:
        self.loop, self.relay = asyncio.get_running_loop(), Relay(learner, ANY)
        del self.relay.source.factories["shm"]
        self._started.set()
        self.exit_code = await self.relay.run()

    @property
    def endpoint(self) -> str:
        return self.relay.endpoint

    def join(self) -> int | None:
        self._thread.join(timeout=20)
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
    return hub.server.weights.socket.num_bytes_served


def change(hub: LiveHub) -> None:
    """Other weights for the next version."""
    with torch.no_grad():
        for _, parameter in hub._publisher._parameters:
            parameter.mul_(1.01)


@pytest.mark.parametrize("num_actors", [1, 4])
def test_the_learner_sends_every_version_once_however_many_actors_pull_it(tmp_path, models, num_actors):
    with LiveHub(tmp_path, config_of("publish.delta_max_ratio=0")) as hub:
        hub.publish(0, models[0])
        peer = hub.dial()
        welcome = peer.join()
        with relay_of(hub) as relay, ThreadPoolExecutor(num_actors) as threads:
            actors = [puller(hub, welcome, relay.endpoint) for _ in range(num_actors)]
            news, endpoint = (welcome.manifest, welcome.offers), welcome.offers[-1].name
            for version in range(NUM_VERSIONS):
                if version:
                    change(hub)
                    hub.publish(version, models[0])
                    announce = peer.hear(Announce)
                    news = (announce.manifest, announce.offers)
                fetched = list(threads.map(lambda one, news=news: one.fetch(*news, welcome.layout), actors))
                assert all(one.document.manifest == news[0] and one.source == InstallSource.ZMQ for one in fetched)
            assets = list(threads.map(
                lambda one: one.fetch_assets(endpoint, welcome.assets_nbytes, welcome.assets_digest), actors
            ))

        assert {xxhash.xxh3_128_digest(one) for one in assets} == {welcome.assets_digest}
        nbytes = sum(welcome.layout.bucket_bytes)
        assert served(hub) == NUM_VERSIONS * nbytes + welcome.assets_nbytes
        relayed = relay.relay.socket.num_bytes_served
        assert relayed == num_actors * served(hub)


def test_the_same_weights_under_a_new_number_need_no_transfer_to_the_relay(tmp_path, models):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, models[0])
        peer = hub.dial()
        welcome = peer.join()
        with relay_of(hub) as relay:
            one = puller(hub, welcome, relay.endpoint)
            first = one.fetch(welcome.manifest, welcome.offers, welcome.layout)
            before = served(hub)
            hub.publish(1, models[0])
            announce = peer.hear(Announce)
            second = one.fetch(announce.manifest, announce.offers, welcome.layout)

        assert served(hub) == before
        assert second.document.view(0, second.document.nbytes) == first.document.view(0, first.document.nbytes)
