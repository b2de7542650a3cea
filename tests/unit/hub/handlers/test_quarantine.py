"""A real actor whose engine goes wrong, as its real hub sees it: found, in quarantine, back when a version passes."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
import zmq

from actors.runtime import build_runtime, weight_source
from actors.worker import Worker
from learner.model.policy import load_policy
from learner.publish.probe import Prober, probe_tokens
from streamrl.config.load import from_plain
from streamrl.transport.client import HubClient
from streamrl.transport.session import ActorSession, LinkClosed
from tests.kit.system import until
from tests.unit.config.setting_harness import VOCAB_SIZE, LiveHub, config_of, tiny_model

pytestmark = pytest.mark.timeout(400)
WORDS = (
    "rollout.max_prompt_tokens=64", "rollout.train.sampling.max_new_tokens=4", "rollout.num_responses_per_prompt=2",
    "actors.num_concurrent=4", "actors.share_weights=false", "hub.heartbeat_s=0.05", "staleness.eta=200",
    "staleness.max_lag=400",
)


class LiveActor:
    """An actor in a thread."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint, self._up = endpoint, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="actor")
        self._thread.start()
        assert self._up.wait(200)

    async def _live(self) -> None:
        context, local = zmq.Context(), from_plain({"policy": {"tiny": {"enabled": True}}}, [])
        link = ActorSession("a1", 11, engine="native", max_leases=2, transports=("shm", "zmq"), software="test")
        self.loop = asyncio.get_running_loop()
        source, _ = weight_source(local.actors, context)
        self.worker = Worker(HubClient(self._endpoint, link), lambda welcome: build_runtime(welcome, [], source))
        self._up.set()
        await self.worker.run()
        context.destroy(linger=0)

    @property
    def model(self):
        return self.worker._runtime.engine._scheduler.forward._model

    def look(self) -> None:
        """What happens by itself once a minute."""
        asyncio.run_coroutine_threadsafe(self.worker._updater.check(), self.loop).result(200)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.worker.client.events.put_nowait, LinkClosed(0, "the test is over"))
        self._thread.join(timeout=200)


@pytest.fixture
def live(tmp_path: Path):
    """(hub, publish, actor): the actor serves version 0; `publish(version)` brings a version with a probe."""
    model_dir = tiny_model(tmp_path / "model")
    ids = probe_tokens(model_dir, VOCAB_SIZE, 40)
    prober = Prober(load_policy(model_dir), ids, every=1, tolerance=0.1, device="cpu")
    with LiveHub(tmp_path, config_of(*WORDS)) as hub:
        def publish(version: int) -> None:
            hub.publish(version, model_dir, prober.probe_if_due(version))

        publish(0)
        actor = LiveActor(hub.server.endpoint)
        try:
            until(lambda: accepted(hub) > 2)
            yield hub, publish, actor
        finally:
            actor.close()


def accepted(hub: LiveHub) -> float:
    return hub.server.context.ledger.counters()["num_groups_accepted"]


def leased(hub: LiveHub) -> float:
    return hub.server.context.ledger.counters()["num_groups_leased"]


def health_metrics(hub: LiveHub) -> dict[str, float]:
    return hub.server.context.weights.health.metrics()


def test_a_healthy_actor_passes_and_works(live):
    hub, publish, actor = live
    publish(1)
    until(lambda: health_metrics(hub)["num_probes"] == 2)
    actor.look()
    before = accepted(hub)
    until(lambda: accepted(hub) > before)

    found = health_metrics(hub)
    assert found["num_probe_failures"] == found["num_quarantined"] == 0
    assert found["probe_mean_difference"] < 1e-4, "two implementations of one model in float32"


def test_an_engine_that_computes_something_else_gets_no_leases_until_a_version_passes(live, caplog):
    hub, publish, actor = live
    hook = actor.model.model.norm.register_forward_hook(lambda module, args, out: -3 * out)

    actor.look()

    until(lambda: health_metrics(hub)["num_quarantined"] == 1)
    until(lambda: hub.server.context.ledger.counters()["num_leases_open"] == 0)
    until(lambda: [link.state for link in hub.server.context.connections.all()] == ["quarantined"])
    until(lambda: health_metrics(hub)["num_probe_failures"] == 2)  # found, its document loaded again, found again
    assert "QUARANTINE: a1 does not compute with version 1:0" in caplog.text
    granted = leased(hub)
    publish(1)
    until(lambda: health_metrics(hub)["num_probe_failures"] == 4)
    assert leased(hub) == granted and health_metrics(hub)["num_quarantined"] == 1
    hook.remove()
    publish(2)
    until(lambda: health_metrics(hub)["num_quarantined"] == 0)
    until(lambda: leased(hub) > granted)
    before = accepted(hub)
    until(lambda: accepted(hub) > before)


def test_a_bit_that_flipped_in_memory_is_found_named_and_healed(live, caplog):
    hub, _, actor = live
    with torch.inference_mode():
        live = actor.worker._runtime.engine.live_tensors()["model.norm.weight"]
        live.view(torch.int32)[3] ^= 1 << 28

    actor.look()

    until(lambda: health_metrics(hub)["num_probe_failures"] == 1 and health_metrics(hub)["num_quarantined"] == 0)
    assert "0 of 1 does not match the published weights: model.norm.weight differs from element 3 on" in caplog.text
    before = accepted(hub)
    until(lambda: accepted(hub) > before)
