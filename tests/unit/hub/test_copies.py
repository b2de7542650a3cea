"""How often one group is encoded and decoded on its way from an actor to a learner rank."""

import asyncio
import threading
from collections import Counter

import pytest

from actors.rollout import sendable
from learner.data.trajectories import read_groups
from learner.hub.ledger.cut import FRAMES_EVERY, LagProof
from streamrl.messages import BatchShare, Group, Installed, InstallSource, Leases, Manifest, Welcome, codec
from streamrl.transport.client import HubClient
from streamrl.transport.session import ActorSession, Progress
from tests.unit.config.setting_harness import LiveHub, config_of
from tests.unit.hub.factories import FakeActor

GROUPS_PER_BATCH = 2


class CountingEncoder:
    """The codec's encoder; counts the groups that pass, by number."""

    def __init__(self, counts: Counter[int]) -> None:
        self._encoder, self._counts = codec._ENCODER, counts

    def encode_into(self, message: object, *rest: object) -> None:
        self._counts.update([message.group_id] if isinstance(message, Group) else [])
        self._encoder.encode_into(message, *rest)


async def generate(endpoint: str, manifest: Manifest, leased: Counter[int], over: threading.Event) -> None:
    """An actor whose session, thread and socket are real, and whose answers are made up; counts leases by group."""
    session = ActorSession("a1", 11, engine="test", max_leases=4, transports=("zmq",), software="test")
    client = HubClient(endpoint, session)
    client.start()
    player = FakeActor(None, "a1", ref=manifest.ref)  # type: ignore[arg-type]
    try:
        while not over.is_set():
            try:
                event = (await asyncio.wait_for(client.events.get(), 0.1)).event
            except TimeoutError:
                continue
            if isinstance(event, Welcome):
                client.update(Progress(max_leases=4, free=4))
                client.report_installed(Installed(
                    manifest.ref, manifest.root, True, InstallSource.ZMQ, 0.0, 0.0, 0.0, 0.0, 0, "",
                ))
            for lease in event.grants if isinstance(event, Leases) else ():
                leased[lease.group_id] += 1
                client.send_group(sendable(player.group(lease), lease, session.limits))
    finally:
        client.close()


@pytest.mark.timeout(120)
def test_a_group_is_encoded_once_and_decoded_twice(tmp_path, model_dir, monkeypatch):
    encoded, decoded = Counter[int](), Counter[int]()
    decode = codec.Decoder.decode

    def counted(self: codec.Decoder, frame: bytes) -> object:
        message = decode(self, frame)
        decoded.update([message.group_id] if isinstance(message, Group) else [])
        return message

    monkeypatch.setattr(codec, "_ENCODER", CountingEncoder(encoded))
    monkeypatch.setattr(codec.Decoder, "decode", counted)
    monkeypatch.setattr(LagProof, "frames_every", FRAMES_EVERY)
    trained = []
    with LiveHub(tmp_path, config_of("rollout.num_responses_per_prompt=4")) as hub:
        manifest = hub.publish(0, model_dir)
        leased, over = Counter[int](), threading.Event()
        actor = threading.Thread(target=asyncio.run, args=(generate(hub.server.endpoint, manifest, leased, over),))
        actor.start()
        try:
            for version in range(2):
                share = hub.link.next_batch(version)
                assert isinstance(share, BatchShare)
                trained.append({row.group_id for row in read_groups(share.groups)})
                hub.link.trained(version + 1, skipped=False)
        finally:
            over.set()
            actor.join()

    first, second = trained
    assert len(first) == len(second) == GROUPS_PER_BATCH
    assert all(encoded[group] == leased[group] >= 1 for group in first | second)
    assert {decoded[group] for group in second} == {2}  # by the hub and by a rank
    assert {decoded[group] for group in first} == {3}  # of each sixteenth batch the proof of its lag reads the frames
