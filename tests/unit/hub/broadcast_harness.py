"""The GPU transports at a real hub over real sockets; the test plays the broadcaster and the actors."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from learner.hub.context.broadcaster_process import BroadcasterProcess
from learner.hub.context.settings import HubSettings
from streamrl.messages import (
    HUB_TO_BROADCASTER,
    ActorHeartbeat,
    ActorState,
    BroadcastDocument,
    BroadcastReport,
    BroadcastStage,
    BroadcastUp,
    Hello,
    IpcBufferTicket,
    Manifest,
    NcclState,
    Welcome,
)
from streamrl.messages.codec import Decoder, encode
from tests.unit.config.setting_harness import PATIENCE_MS, LiveHub, Peer, config_of

NCCL = "publish.transports=[ipc,nccl,shm,zmq]"


class ScriptedBroadcaster:
    """A broadcaster that does what the test says. One at a time, as the hub has them."""

    def __init__(self, settings: HubSettings, slots: IpcBufferTicket | None = None, device: str = "") -> None:
        self.settings, self.killed, self.loads = settings, threading.Event(), True
        self.status: int | None = None
        self._decoder = Decoder(HUB_TO_BROADCASTER)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(settings.rank_endpoint)
        self._socket.send(encode(BroadcastUp(slots.device if slots else device, "ipc:///nowhere", slots)))

    def receive(self, kind):
        while True:
            assert self._socket.poll(PATIENCE_MS), f"no {kind.__name__} came"
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, BroadcastDocument) and self.loads:
                self.report(0, BroadcastStage.LOADED, ref=message.manifest.ref)
            if isinstance(message, kind):
                return message

    def report(self, epoch: int, stage: BroadcastStage, **fields) -> None:
        self._socket.send(encode(BroadcastReport(epoch, stage, **fields)))

    def alive(self) -> bool:
        return not self.killed.is_set()

    def exit_status(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.killed.set()


class BroadcastHarness:
    """A hub, its broadcasters, and peers that are actors.

    Args:
        make_broadcaster: makes what the hub starts; a ScriptedBroadcaster with these slots unless given.
    """

    def __init__(
        self, path: Path, model_dir: Path, *words: str, slots: IpcBufferTicket | None = None,
        make_broadcaster: Callable[[HubSettings], BroadcasterProcess] | None = None,
    ) -> None:
        self.broadcasters: list[Any] = []
        self._peers: list[Peer] = []
        self._came = threading.Semaphore(0)
        self._make = make_broadcaster or (lambda settings: ScriptedBroadcaster(settings, slots))
        self._model_dir, self._version = model_dir, -1
        if not any("bucket_deadline_s" in word for word in words):
            words = (*words, "publish.nccl_bucket_deadline_s=600")  # a broadcaster that only a test speaks says little
        self.hub = LiveHub(path, config_of(NCCL, *words), start_broadcaster=self._start)
        self.publish()

    def _start(self, settings: HubSettings) -> BroadcasterProcess:
        self.broadcasters.append(self._make(settings))
        self._came.release()
        return self.broadcasters[-1]

    def broadcaster(self) -> Any:
        """The next one that the hub starts."""
        assert self._came.acquire(timeout=20)
        return self.broadcasters[-1]

    def publish(self) -> Manifest:
        self._version += 1
        return self.hub.publish(self._version, self._model_dir)

    def actor(self, name: str, *, transports: tuple[str, ...] = ("nccl", "zmq"), device: str = "") -> Peer:
        peer = self.hub.connect()
        peer.send(Hello(
            protocol_min=1, protocol_max=1, actor_id=name, incarnation=11, run_id=None, engine="test", software="test",
            max_leases=4, transports=transports, installed=None, held=(), outbox=(), next_seq=1, device=device,
        ))
        peer.welcome = peer.receive(Welcome)
        self._peers.append(peer)  # the hub notices a connection that closes, as that of a forgotten peer would
        self.beat(peer)
        return peer

    def beat(self, peer: Peer, **nccl: int) -> None:
        manifest = self.hub.server.context.weights.manifest
        peer.send(ActorHeartbeat(
            11, 1, ActorState.RUNNING, 0, 0, manifest.ref, 0, (), 0, 0, 0, {}, 4, manifest.root, NcclState(**nccl)
        ))
        self.hub.link.refresh_status()

    def candidates(self, count: int) -> None:
        while len(self.hub.server.broadcast._candidates()) != count:  # the test's time limit ends it
            threading.Event().wait(0.01)
