"""The hub's part in ways from GPU to GPU: a real hub and real sockets; sender and actors are spoken by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from learner.hub.hub_settings import HubSettings
from learner.hub.sender_process import sender_settings
from learner.setup import check_transports
from streamrl.codec import Decoder, encode
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.messages import (
    HUB_TO_SENDER,
    ActorBeat,
    ActorState,
    Announce,
    Hello,
    Manifest,
    NcclState,
    SenderAbort,
    SenderDocument,
    SenderForm,
    SenderReport,
    SenderSend,
    SenderStage,
    SenderUp,
    SlotTicket,
    Welcome,
)
from streamrl.weights.manifest import DIGEST_FOLD128, check_manifest
from tests.unit.setting_stage import PATIENCE_MS, LiveHub, Peer, config_of, tiny_model

pytestmark = pytest.mark.timeout(60)

NCCL = "publish.transports=[ipc,nccl,shm,zmq]"
SLOTS = SlotTicket("gpu-7", (b"h" * 64, b"i" * 64), 1 << 20, 10.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


class SpokenSender:
    """A sender that does what the test says. One at a time, as the hub has them."""

    def __init__(self, settings: HubSettings, slots: SlotTicket | None = None) -> None:
        self.settings, self.killed = settings, threading.Event()
        self._decoder = Decoder(HUB_TO_SENDER)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(settings.rank_endpoint)
        self._socket.send(encode(SenderUp(slots.device if slots else "", "ipc:///nowhere", slots)))

    def hear(self, kind):
        while True:
            assert self._socket.poll(PATIENCE_MS), f"no {kind.__name__} came"
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, kind):
                return message

    def report(self, epoch: int, stage: SenderStage, **fields) -> None:
        self._socket.send(encode(SenderReport(epoch, int(stage), **fields)))

    def alive(self) -> bool:
        return not self.killed.is_set()

    def kill(self) -> None:
        self.killed.set()


class Scene:
    """A hub, its senders, and peers that are actors."""

    def __init__(self, path: Path, model_dir: Path, *words: str, slots: SlotTicket | None = None) -> None:
        self.senders: list[SpokenSender] = []
        self._came = threading.Semaphore(0)
        self._slots, self._model_dir, self._version = slots, model_dir, -1
        self.hub = LiveHub(path, config_of(NCCL, *words), start_sender=self._start)
        self.publish()

    def _start(self, settings: HubSettings) -> SpokenSender:
        self.senders.append(SpokenSender(settings, self._slots))
        self._came.release()
        return self.senders[-1]

    def sender(self) -> SpokenSender:
        """The next one that the hub starts."""
        assert self._came.acquire(timeout=20)
        return self.senders[-1]

    def publish(self) -> Manifest:
        self._version += 1
        return self.hub.publish(self._version, self._model_dir)

    def actor(self, name: str, *, transports: tuple[str, ...] = ("nccl", "zmq"), device: str = "") -> Peer:
        peer = self.hub.dial()
        peer.say(Hello(
            protocol_min=1, protocol_max=1, actor_id=name, incarnation=11, run_id=None, engine="test", software="test",
            slots=4, transports=transports, installed=None, held=(), outbox=(), next_seq=1, device=device,
        ))
        peer.welcome = peer.hear(Welcome)
        self.beat(peer)
        return peer

    def beat(self, peer: Peer, **nccl: int) -> None:
        manifest = self.hub.server.weights.manifest
        peer.say(ActorBeat(
            11, 1, int(ActorState.RUNNING), 0, 0, manifest.ref, 0, (), 0, 0, 0, {}, 4, manifest.root, NcclState(**nccl)
        ))
        self.hub.link.refresh_status()

    def candidates(self, count: int) -> None:
        while len(self.hub.server.devices._candidates()) != count:  # the test's time limit ends a wait that is in vain
            threading.Event().wait(0.01)


@pytest.fixture
def scene(tmp_path, model_dir) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(*words: str, **options) -> Scene:
        scenes.append(Scene(tmp_path, model_dir, *words, **options))
        return scenes[-1]

    yield make
    for one in scenes:
        one.hub.__exit__()


def ways(announce: Announce | Welcome) -> list[str]:
    return [offer.transport for offer in announce.offers]


def test_an_epoch_from_publish_to_broadcast(scene):
    one = scene()
    sender = one.sender()
    first, second = one.actor("a"), one.actor("b", transports=("zmq",))
    one.candidates(1)
    manifest = one.publish()

    assert sender.hear(SenderForm) == SenderForm(1, 2)  # only one of the two can nccl
    assert ways(second.hear(Announce)) == ["shm", "zmq"]
    sender.report(1, SenderStage.NAMED, unique_id=b"the id")
    announce = first.hear(Announce)
    assert ways(announce) == ["nccl", "shm", "zmq"]
    offer = announce.offers[0]
    assert (offer.nccl.unique_id, offer.nccl.world, offer.nccl.rank) == (b"the id", 2, 1)
    check_manifest(offer.manifest, first.welcome.layout, DIGEST_FOLD128)
    assert offer.manifest.ref == manifest.ref

    sender.report(1, SenderStage.FORMED)
    one.beat(first, formed=1)
    assert sender.hear(SenderSend) == SenderSend(1, manifest.ref)


def test_the_sender_is_told_of_every_document_before_it_must_send_it(scene):
    one = scene()
    sender = one.sender()

    document = sender.hear(SenderDocument)
    assert document.manifest.ref.version == 0 and Path(document.path).exists()
    assert document.device_manifest.digest_kind == DIGEST_FOLD128
    manifest = one.publish()
    assert sender.hear(SenderDocument).manifest == manifest


def test_a_member_that_loses_its_communicator_ends_the_epoch(scene):
    one = scene()
    sender, peer, other = one.sender(), one.actor("a"), one.actor("b")
    one.candidates(2)
    one.publish()
    sender.report(1, SenderStage.NAMED, unique_id=b"id")
    sender.report(1, SenderStage.FORMED)
    for member in (peer, other):
        assert ways(member.hear(Announce))[0] == "nccl"
        one.beat(member, formed=1)
    sender.hear(SenderSend)

    one.beat(peer, failed=1)

    assert sender.hear(SenderAbort) == SenderAbort(1)
    assert sender.hear(SenderForm) == SenderForm(2, 2)  # without the one that lost it


def test_who_can_form_no_more_is_no_candidate(scene):
    one = scene()
    one.sender()
    peer = one.actor("a")
    one.candidates(1)
    one.beat(peer, broken=True)
    one.candidates(0)


@pytest.mark.parametrize(("seconds", "replaced"), [(0.3, True), (100, False)])
def test_a_sender_that_says_nothing_is_replaced_after_the_time_set(scene, seconds, replaced):
    one = scene(f"publish.nccl_init_deadline_s={seconds}")
    sender = one.sender()
    one.actor("a")
    one.candidates(1)
    one.publish()
    sender.hear(SenderForm)

    assert sender.killed.wait(20.0 if replaced else 1.0) == replaced
    if replaced:
        assert one.sender().hear(SenderForm).epoch == 2


def test_members_are_told_the_deadlines_that_are_set(scene):
    one = scene("publish.nccl_init_deadline_s=7", "publish.nccl_bucket_deadline_s=3", "publish.bucket_bytes=512")
    sender, peer = one.sender(), one.actor("a")
    told = sender_settings(sender.settings)
    assert (told.init_deadline_s, told.bucket_deadline_s, told.slot_bytes) == (7, 3, 512)
    one.candidates(1)
    one.publish()
    sender.report(1, SenderStage.NAMED, unique_id=b"id")

    ticket = peer.hear(Announce).offers[0].nccl
    assert (ticket.init_deadline_s, ticket.bucket_deadline_s) == (7, 3)


def test_an_actor_on_the_same_device_is_offered_slots_and_no_place_in_a_communicator(scene):
    one = scene(slots=SLOTS)
    sender = one.sender()
    sender.hear(SenderDocument)
    both = ("ipc", "nccl", "zmq")
    near, far = one.actor("near", transports=both, device="gpu-7"), one.actor("far", transports=both, device="gpu-8")
    one.candidates(1)
    one.publish()

    announce = near.hear(Announce)
    assert ways(announce) == ["ipc", "shm", "zmq"] and announce.offers[0].slots == SLOTS
    assert sender.hear(SenderForm) == SenderForm(1, 2)
    sender.report(1, SenderStage.NAMED, unique_id=b"id")
    assert ways(far.hear(Announce)) == ["nccl", "shm", "zmq"]


@pytest.mark.parametrize("order", [["shm", "zmq"], ["zmq", "shm"], ["zmq"]])
def test_weights_are_offered_in_the_ways_and_the_order_that_are_set(tmp_path, model_dir, order):
    with LiveHub(tmp_path, config_of(f"publish.transports=[{','.join(order)}]")) as hub:
        hub.publish(0, model_dir)

        assert ways(hub.dial().join()) == order
        assert not hub.server.devices.metrics()  # and no sender is started


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_a_learner_without_a_gpu_refuses_ways_that_need_one(way):
    import torch

    with pytest.raises(ConfigError, match=f"the transport {way} .* the device here is cpu"):
        check_transports([way, "zmq"], torch.device("cpu"))


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("publish.transports=[carrier,zmq]", "choose of ipc, nccl, shm, zmq"),
        ("publish.transports=[nccl,shm]", "must hold zmq"),
        ("actors.transports=[zmq,zmq]", "twice"),
        ("publish.nccl_init_deadline_s=0", "must be greater than 0"),
    ],
)
def test_impossible_transports_are_refused_by_name(word, wrong):
    with pytest.raises(ConfigError, match=wrong):
        load_config(["experiment=quickstart", word])
