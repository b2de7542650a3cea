"""GPU transports end to end on a CPU: announce -> epoch -> broadcast -> verify -> install.

Hub, broadcaster loop and actors are real; NCCL and CUDA IPC are replaced by FakeCommunicators over sockets and by
FakeDeviceMemory in files.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from actors.runtime import ActorRuntime, build_runtime, weight_source
from actors.weights.device import DeviceWeights
from actors.worker import Worker
from learner.broadcaster.service import BroadcasterService
from learner.hub.context.settings import HubSettings
from streamrl.messages import VersionRef, Welcome
from streamrl.transport.client import HubClient
from streamrl.transport.session import ActorSession
from streamrl.weights.gpu.broadcast import Broadcaster
from streamrl.weights.gpu.ipc import IpcBufferServer
from tests.fakes.communicator import FakeLibrary
from tests.fakes.device_memory import FakeDeviceMemory
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model

torch.set_num_threads(1)
ONE_AT_A_TIME = threading.Lock()
"""Reading settings parses source code, and CPython 3.11 does that badly in two threads; real actors are processes."""


class BroadcasterThread:
    """A broadcaster as `python -m learner.broadcaster` builds it, in a thread and without a GPU; `kill` silences it."""

    def __init__(self, settings: HubSettings, folder: Path, library: FakeLibrary) -> None:
        options, self._library = settings.publish, library
        self._context = zmq.Context()
        self.broadcaster = Broadcaster(library, "cpu") if "nccl" in options.transports else None
        self.slots = None
        if "ipc" in options.transports:
            self.slots = IpcBufferServer(
                FakeDeviceMemory(folder), self._context, f"ipc://{folder}/s{time.monotonic_ns()}",
                slot_bytes=options.bucket_bytes, deadline_s=options.nccl_bucket_deadline_s,
            )
        service = BroadcasterService(
            self._context, settings.rank_endpoint, broadcaster=self.broadcaster, slots=self.slots,
            init_deadline_s=options.nccl_init_deadline_s, bucket_deadline_s=options.nccl_bucket_deadline_s,
            pinned=False,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=service.run, args=(self._stop.is_set,), daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def exit_status(self) -> int | None:
        return None if self.alive() else 0

    def kill(self) -> None:
        self._stop.set()
        self._library.die()
        self._thread.join(timeout=10)


class ActorThread:
    """An actor as `streamrl actor` builds it, in a thread."""

    def __init__(self, endpoint: str, name: str, words: list[str], folder: Path, gpu: str) -> None:
        self.library = FakeLibrary()
        self.name, self.reports = name, []
        with ONE_AT_A_TIME:
            self._local = config_of(*words)
        self._loop = asyncio.new_event_loop()
        self._worker: Worker | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._life(endpoint, words, folder, gpu),), daemon=True
        )
        self._thread.start()
        assert self._ready.wait(20)

    async def _life(self, endpoint: str, words: list[str], folder: Path, gpu: str) -> None:
        def make(names, device, context) -> DeviceWeights:
            return DeviceWeights(
                names, "cpu", context, library=lambda device: self.library,
                memory=lambda device: FakeDeviceMemory(folder, gpu),
            )

        source, device_weights = weight_source(self._local.actors, zmq.Context(), make)
        link = ActorSession(
            self.name, 7, engine="native", max_leases=2, transports=tuple(source.factories), software="test",
            device=device_weights.device_id,
        )
        client = HubClient(endpoint, link)
        device_weights.report = client.report_nccl
        report = client.report_installed
        client.report_installed = lambda message: (self.reports.append(message), report(message))

        def build(welcome: Welcome) -> ActorRuntime:
            with ONE_AT_A_TIME:
                return build_runtime(welcome, words, source, device_weights)

        self._worker = Worker(client, build)
        self._ready.set()
        await self._worker.run()

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._worker.leave, "the test ends")
            self._loop.call_soon_threadsafe(self._worker.leave, "now")
        self._thread.join(timeout=20)

    def installed(self, version: int) -> str | None:
        """Transport by which the version became live here; None before."""
        for report in self.reports:
            if report.target == VersionRef(1, version):
                assert report.ok, report.error
                return {1: "shm", 2: "zmq", 4: "nccl", 5: "ipc"}.get(report.source, str(report.source))
        return None


class TransportHarness:
    """A hub with its broadcaster and actors."""

    def __init__(self, path: Path, *words: str) -> None:
        self.path, self.broadcasters, self.actors = path, [], []
        self.words = [*words, "actors.num_concurrent=4", "publish.bucket_bytes=4096"]
        self.library = FakeLibrary()
        self.folder = Path(path / "slots")
        self.folder.mkdir()
        self.hub = LiveHub(path, config_of(*self.words), start_broadcaster=self._start_broadcaster)
        self.model = tiny_model(path / "model")
        self.version = -1
        self.publish()

    def _start_broadcaster(self, settings: HubSettings) -> BroadcasterThread:
        self.broadcasters.append(BroadcasterThread(settings, self.folder, self.library))
        return self.broadcasters[-1]

    def publish(self) -> int:
        if self.version >= 0:
            with torch.no_grad():
                for _, parameter in self.hub._publisher._tensors:
                    parameter.add_(0.01)
        self.version += 1
        self.hub.publish(self.version, self.model)
        return self.version

    def actor(self, name: str, gpu: str = "another-gpu") -> ActorThread:
        words = [word for word in self.words if word.startswith("actors.")]
        self.actors.append(ActorThread(self.hub.server.endpoint, name, words, self.folder, gpu))
        return self.actors[-1]

    def until(self, condition: Callable[[], object], what: str, seconds: float = 40.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}"
            time.sleep(0.01)

    def everywhere(self, *actors: ActorThread) -> list[str | None]:
        """Transport of the newest version to each actor."""
        self.until(lambda: all(actor.installed(self.version) for actor in actors), f"version {self.version} everywhere")
        return [actor.installed(self.version) for actor in actors]

    def ready(self, count: int) -> None:
        devices = self.hub.server.broadcast
        self.until(lambda: len(devices._candidates()) == count and devices._up is not None, f"{count} candidates")

    def close(self) -> None:
        for actor in self.actors:
            actor.leave()
        self.hub.__exit__()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., TransportHarness]]:
    stages: list[TransportHarness] = []

    def make(*words: str) -> TransportHarness:
        stages.append(TransportHarness(tmp_path, *words))
        return stages[-1]

    yield make
    for one in stages:
        one.close()


NCCL = ("publish.transports=[ipc,nccl,shm,zmq]", "actors.transports=[nccl,shm,zmq]")


def test_versions_reach_two_actors_by_one_broadcast_each_and_the_epoch_is_reused(harness):
    run = harness(*NCCL)
    one, other = run.actor("one"), run.actor("other")
    assert set(run.everywhere(one, other)) <= {"shm", "zmq"}  # late joiners pull
    run.ready(2)

    for _ in range(3):
        run.publish()
        assert run.everywhere(one, other) == ["nccl", "nccl"]

    membership = run.hub.server.broadcast.membership
    run.until(lambda: membership.num_broadcasts == 3, "the broadcaster's last report")
    assert (membership.num_formed, membership.num_broadcasts, membership.num_given_up) == (1, 3, 0)
    live = {name: tensor for name, tensor in run.hub._publisher._tensors}
    engine = one._worker._runtime.engine
    for name, tensor in engine.live_tensors().items():
        assert torch.equal(tensor, live[name]), name
    run.hub.link.refresh_status()
    counters = run.hub.link.status.counters
    assert counters["num_installs_nccl"] == 6 and counters["num_abandoned_threads"] == 0


def test_a_joiner_pulls_and_takes_part_in_the_next_epoch_as_those_do_that_are_left(harness):
    run = harness(*NCCL)
    one, other = run.actor("one"), run.actor("other")
    run.everywhere(one, other)
    run.ready(2)
    run.publish()
    assert run.everywhere(one, other) == ["nccl", "nccl"]

    late = run.actor("late")
    run.everywhere(late)
    run.ready(3)
    run.publish()
    assert run.everywhere(one, other, late) == ["nccl"] * 3

    other.leave()
    run.ready(2)
    run.publish()
    assert run.everywhere(one, late) == ["nccl", "nccl"]
    assert run.hub.server.broadcast.membership.num_formed == 3


def test_a_damaged_broadcast_is_refused_and_the_version_comes_another_way(harness):
    run = harness(*NCCL)
    one, other = run.actor("one"), run.actor("other")
    run.everywhere(one, other)
    run.ready(2)

    def flip(data: bytearray) -> None:
        if len(data) > 100:  # a bucket, not the header
            data[17] ^= 1

    other.library.damage = flip
    run.publish()
    ways = run.everywhere(one, other)
    # The refusal ends the epoch: who had not received every bucket by then pulls the version, too.
    assert ways[0] in ("nccl", "shm", "zmq") and ways[1] in ("shm", "zmq")

    other.library.damage = lambda data: None
    run.until(lambda: run.hub.server.broadcast.membership.epoch > 1 or not run.hub.server.broadcast.membership.members,
              "the damaged epoch ends")
    run.publish()
    assert run.everywhere(one)[0] == "nccl"


def test_a_member_that_hangs_while_forming_costs_one_deadline_and_loses_no_version(harness):
    run = harness(*NCCL, "publish.nccl_init_deadline_s=2", "publish.nccl_bucket_deadline_s=2")
    one, other = run.actor("one"), run.actor("other")
    run.everywhere(one, other)
    run.ready(2)
    never = threading.Event()
    other.library.connect = lambda world, unique_id, rank: never.wait()
    run.publish()
    assert set(run.everywhere(one, other)) <= {"shm", "zmq", "nccl"}

    # The broadcaster sat in a call that nothing ends, so it was replaced; `other` has a thread stuck and joins no more.
    run.until(lambda: len(run.broadcasters) >= 2, "a new broadcaster")
    run.ready(1)
    run.publish()
    assert run.everywhere(one) == ["nccl"] and run.everywhere(other)[0] in ("shm", "zmq")
    run.until(lambda: run.hub.server.broadcast.metrics()["num_abandoned_threads"] >= 1, "the stuck thread is counted")


def test_a_broadcaster_that_dies_in_a_broadcast_is_replaced_and_the_version_arrives_all_the_same(harness):
    run = harness(*NCCL, "publish.nccl_bucket_deadline_s=2")
    one = run.actor("one")
    run.everywhere(one)
    run.ready(1)
    run.publish()
    assert run.everywhere(one) == ["nccl"]
    killed = threading.Event()

    def die(rank: int, nbytes: int) -> None:
        if nbytes > 100 and not killed.is_set():
            killed.set()
            run.broadcasters[0]._stop.set()
            run.broadcasters[0].broadcaster._guard._inner.abort()

    run.library.on_broadcast = die
    run.publish()
    assert run.everywhere(one)[0] in ("shm", "zmq", "nccl")
    run.until(lambda: len(run.broadcasters) == 2, "a new broadcaster")
    run.ready(1)
    run.publish()
    assert run.everywhere(one) == ["nccl"]


def test_an_actor_on_the_learners_gpu_copies_from_slots_and_stays_out_of_epochs(harness):
    run = harness("publish.transports=[ipc,nccl,shm,zmq]", "actors.transports=[ipc,nccl,shm,zmq]")
    near, far = run.actor("near", gpu="fake-gpu-0"), run.actor("far")
    run.everywhere(near, far)
    run.ready(1)

    for _ in range(3):
        run.publish()
        assert run.everywhere(near, far) == ["ipc", "nccl"]

    assert set(run.hub.server.broadcast.membership.members) == {"far"}
    reader = near._worker._runtime.device_weights._reader
    assert reader.memory.num_opened == 2  # once each, not once a version


def test_slots_that_hang_cost_one_deadline_and_lose_no_version_and_their_broadcaster_is_replaced(harness):
    run = harness("publish.transports=[ipc,shm,zmq]", "actors.transports=[ipc,shm,zmq]",
                "publish.nccl_bucket_deadline_s=1")
    near = run.actor("near", gpu="fake-gpu-0")
    run.until(lambda: run.hub.server.broadcast._up is not None, "a broadcaster")
    run.everywhere(near)
    run.publish()
    assert run.everywhere(near) == ["ipc"]

    first = run.broadcasters[0]

    class Hangs:
        """As a copy that the device never ends, in a process that only its own end frees from it."""

        layout = run.hub._publisher.layout

        def fill(self, index: int, out: torch.Tensor) -> None:
            first._stop.wait()

    publish = first.slots.publish
    first.slots.publish = lambda ref, source: publish(ref, Hangs())
    for _ in range(2):
        run.publish()
        assert run.everywhere(near)[0] in ("shm", "ipc")

    run.until(lambda: len(run.broadcasters) == 2 and run.hub.server.broadcast._up is not None, "a new broadcaster")
    run.publish()
    assert run.everywhere(near) == ["ipc"]
    assert run.hub.server.broadcast.metrics()["num_sender_restarts"] == 1
