"""The GPU transports at a real hub over real sockets; the test plays the broadcaster and the actors."""

from pathlib import Path

import pytest

from learner.hub.context.broadcaster_process import EXIT_NO_MEMORY
from learner.setup.preflight import check_transports
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.messages import (
    Announce,
    BroadcastAbort,
    BroadcastDocument,
    BroadcastForm,
    BroadcastSend,
    BroadcastStage,
    IpcBufferTicket,
    Welcome,
)
from streamrl.weights.manifest import DIGEST_FOLD128, check_manifest
from tests.kit.system import until
from tests.unit.config.setting_harness import LiveHub, config_of
from tests.unit.hub.broadcast_harness import ScriptedBroadcaster

SLOTS = IpcBufferTicket("gpu-7", (b"h" * 64, b"i" * 64), 1 << 20, 10.0)


def ways(announce: Announce | Welcome) -> list[str]:
    return [offer.transport for offer in announce.offers]


def test_an_epoch_from_publish_to_broadcast(harness):
    one = harness()
    broadcaster = one.broadcaster()
    first, second = one.actor("a"), one.actor("b", transports=("zmq",))
    one.candidates(1)
    manifest = one.publish()

    assert broadcaster.receive(BroadcastForm) == BroadcastForm(1, 2)  # only one of the two can nccl
    assert ways(second.receive(Announce)) == ["shm", "zmq"]
    broadcaster.report(1, BroadcastStage.NAMED, unique_id=b"the id")
    announce = first.receive(Announce)
    assert ways(announce) == ["nccl", "shm", "zmq"]
    offer = announce.offers[0]
    assert (offer.nccl.unique_id, offer.nccl.world, offer.nccl.rank) == (b"the id", 2, 1)
    check_manifest(offer.manifest, first.welcome.layout, DIGEST_FOLD128)
    assert offer.manifest.ref == manifest.ref

    broadcaster.report(1, BroadcastStage.FORMED)
    one.beat(first, formed=1)
    assert broadcaster.receive(BroadcastSend) == BroadcastSend(1, manifest.ref)


def test_members_are_invited_when_the_broadcaster_has_the_document_and_pull_if_it_cannot_have_it(harness):
    """An invited member waits inside a kernel on the GPU that its engine computes on."""
    one = harness()
    broadcaster, peer = one.broadcaster(), one.actor("a")
    broadcaster.receive(BroadcastDocument)
    one.candidates(1)
    broadcaster.loads = False
    manifest = one.publish()
    assert broadcaster.receive(BroadcastDocument).manifest == manifest
    one.beat(peer)
    assert one.hub.server.broadcast.membership.epoch == 0  # nothing is formed, and no member told
    broadcaster.report(0, BroadcastStage.LOADED, ref=manifest.ref)
    assert broadcaster.receive(BroadcastForm) == BroadcastForm(1, 2)

    manifest = one.publish()
    broadcaster.receive(BroadcastDocument)
    broadcaster.report(0, BroadcastStage.LOADED, error="no such file", ref=manifest.ref)
    announce = peer.receive(Announce)
    assert announce.manifest == manifest and ways(announce) == ["shm", "zmq"]


def test_the_broadcaster_is_told_of_every_document_before_it_must_send_it(harness):
    one = harness()
    broadcaster = one.broadcaster()

    document = broadcaster.receive(BroadcastDocument)
    assert document.manifest.ref.version == 0 and Path(document.path).exists()
    assert document.device_manifest.digest_kind == DIGEST_FOLD128
    manifest = one.publish()
    assert broadcaster.receive(BroadcastDocument).manifest == manifest


def test_a_member_that_loses_its_communicator_ends_the_epoch(harness):
    one = harness()
    broadcaster, peer, other = one.broadcaster(), one.actor("a"), one.actor("b")
    one.candidates(2)
    one.publish()
    broadcaster.receive(BroadcastForm)
    broadcaster.report(1, BroadcastStage.NAMED, unique_id=b"id")
    broadcaster.report(1, BroadcastStage.FORMED)
    for member in (peer, other):
        assert ways(member.receive(Announce))[0] == "nccl"
        one.beat(member, formed=1)
    broadcaster.receive(BroadcastSend)

    one.beat(peer, failed=1)

    assert broadcaster.receive(BroadcastAbort) == BroadcastAbort(1)
    for member in (peer, other):  # both are told to pull the version
        assert "nccl" not in ways(member.receive(Announce))
    one.publish()
    assert broadcaster.receive(BroadcastForm) == BroadcastForm(2, 3)


def test_who_can_form_no_more_is_no_candidate(harness):
    one = harness()
    one.broadcaster()
    peer = one.actor("a")
    one.candidates(1)
    one.beat(peer, broken=True)
    one.candidates(0)


@pytest.mark.shows("publish.nccl_init_deadline_s")
@pytest.mark.parametrize(("seconds", "replaced"), [(0.3, True), (100, False)])
def test_a_broadcaster_that_says_nothing_is_replaced_after_the_time_set(harness, seconds, replaced):
    one = harness(f"publish.nccl_init_deadline_s={seconds}")
    broadcaster = one.broadcaster()
    one.actor("a")
    one.candidates(1)
    one.publish()
    broadcaster.receive(BroadcastForm)

    assert broadcaster.killed.wait(20.0 if replaced else 1.0) == replaced
    if replaced:
        successor = one.broadcaster()
        until(lambda: one.hub.server.broadcast._up is not None)
        one.candidates(1)
        one.publish()
        assert successor.receive(BroadcastForm).epoch == 2


@pytest.mark.shows("publish.nccl_bucket_deadline_s")
def test_members_are_told_the_deadlines_that_are_set(harness):
    one = harness("publish.nccl_init_deadline_s=7", "publish.nccl_bucket_deadline_s=3", "publish.bucket_bytes=512")
    broadcaster, peer = one.broadcaster(), one.actor("a")
    options = broadcaster.settings.publish
    assert (options.nccl_init_deadline_s, options.nccl_bucket_deadline_s, options.bucket_bytes) == (7, 3, 512)
    one.candidates(1)
    one.publish()
    broadcaster.receive(BroadcastForm)
    broadcaster.report(1, BroadcastStage.NAMED, unique_id=b"id")

    ticket = peer.receive(Announce).offers[0].nccl
    assert (ticket.init_deadline_s, ticket.bucket_deadline_s) == (7, 3)


def test_an_actor_on_the_same_device_is_offered_slots_and_no_place_in_a_communicator(harness):
    one = harness(slots=SLOTS)
    broadcaster = one.broadcaster()
    broadcaster.receive(BroadcastDocument)
    both = ("ipc", "nccl", "zmq")
    near, far = one.actor("near", transports=both, device="gpu-7"), one.actor("far", transports=both, device="gpu-8")
    one.candidates(1)
    one.publish()

    announce = near.receive(Announce)
    assert ways(announce) == ["ipc", "shm", "zmq"] and announce.offers[0].slots == SLOTS
    assert broadcaster.receive(BroadcastForm) == BroadcastForm(1, 2)
    broadcaster.report(1, BroadcastStage.NAMED, unique_id=b"id")
    assert ways(far.receive(Announce)) == ["nccl", "shm", "zmq"]


def test_a_gpu_takes_part_in_a_communicator_once_and_its_member_keeps_its_place(harness, caplog):
    """A second rank on one GPU is an error of NCCL's that ends the epoch of all, again and again."""
    caplog.set_level("INFO", "streamrl.hub")
    one = harness(make_broadcaster=lambda settings: ScriptedBroadcaster(settings, device="host|learner"))
    broadcaster = one.broadcaster()
    one.actor("beside-the-learner", device="host|learner")
    two, _ = one.actor("b", device="host|gpu-1"), one.actor("elsewhere", device="host|gpu-2")
    one.candidates(2)
    one.publish()
    assert broadcaster.receive(BroadcastForm) == BroadcastForm(1, 3)
    broadcaster.report(1, BroadcastStage.NAMED, unique_id=b"id")
    assert ways(two.receive(Announce))[0] == "nccl"

    one.actor("a", device="host|gpu-1")  # before "b" by its name, but later
    until(lambda: "a is on the GPU of b" in caplog.text)
    one.candidates(2)
    assert set(one.hub.server.broadcast.membership.members) == {"b", "elsewhere"}
    assert caplog.text.count("beside-the-learner is on the GPU of the broadcaster") == 1


def test_a_broadcaster_without_memory_is_not_started_again(harness, caplog):
    one = harness()
    broadcaster = one.broadcaster()
    peer = one.actor("a")
    one.candidates(1)
    broadcaster.status = EXIT_NO_MEMORY
    broadcaster.killed.set()

    until(lambda: "the learner's GPU has no memory for the broadcaster" in caplog.text)
    one.publish()
    assert ways(peer.receive(Announce)) == ["shm", "zmq"]
    assert one.hub.server.broadcast._start_at == float("inf") and len(one.broadcasters) == 1


@pytest.mark.shows("publish.transports")
@pytest.mark.parametrize("order", [["shm", "zmq"], ["zmq", "shm"], ["zmq"]])
def test_weights_are_offered_in_the_ways_and_the_order_that_are_set(tmp_path, model_dir, order):
    with LiveHub(tmp_path, config_of(f"publish.transports=[{','.join(order)}]")) as hub:
        hub.publish(0, model_dir)

        assert ways(hub.connect().join()) == order
        assert not hub.server.broadcast.metrics()  # and no broadcaster is started


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_a_learner_without_a_gpu_refuses_ways_that_need_one(way):
    import torch

    with pytest.raises(ConfigError, match=f"the transport {way} .* the device here is cpu"):
        check_transports([way, "zmq"], torch.device("cpu"))


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("publish.transports=[carrier,zmq]", "choose from ipc, nccl, shm, zmq"),
        ("publish.transports=[nccl,shm]", "must contain zmq"),
        ("actors.transports=[zmq,zmq]", "twice"),
        ("publish.nccl_init_deadline_s=0", "must be greater than 0"),
    ],
)
def test_impossible_transports_are_refused_by_name(word, wrong):
    with pytest.raises(ConfigError, match=wrong):
        load_config(["experiment=quickstart", word])
