"""A frame of an actor that arrives damaged is answered, so that what was in it comes again at once."""

from collections.abc import Callable

import pytest

from streamrl.messages import TO_ACTOR, Group, Installed, InstallSource, Lease, Leases, Stop, Welcome
from streamrl.messages.codec import PREAMBLE, Decoder
from streamrl.transport.session import ActorSession, Deliver, Effect, LinkClosed, Progress, Send
from streamrl.transport.sockets import actor_dealer
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model
from tests.unit.hub.factories import FakeActor

KIND = 6
PLACES = {"magic": 0, "protocol": 4, "kind": KIND, "flags": 7, "digest": 8, "body": PREAMBLE.size + 5}


class StoppedClock:
    """A real session and a real socket, but time stands still: what is sent again is sent because the hub answered."""

    def __init__(self, hub: LiveHub) -> None:
        self.now = 1.0
        self.session = ActorSession("a1", 11, engine="fake", max_leases=1, transports=("zmq",), software="test")
        self.socket = actor_dealer(hub.context, hub.server.endpoint)
        self.damage: Callable[[bytes], bytes] = bytes
        self.stops: list[Stop] = []
        self.leases: list[Lease] = []
        self.closed: list[LinkClosed] = []
        self.num_heard, self.num_groups_sent = 0, 0
        self._decoder = Decoder(TO_ACTOR)

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.num_groups_sent += bytes(effect.frame)[KIND] == Group.KIND
                    self.socket.send(self.damage(bytes(effect.frame)))
                case Deliver(Leases() as leases):
                    self.leases += leases.grants
                case LinkClosed():
                    self.closed.append(effect)

    def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self.socket.poll(10_000), "the hub did not answer"
            message = self._decoder.decode(self.socket.recv())
            self.num_heard += 1
            self.stops += [message] if isinstance(message, Stop) else []
            if isinstance(message, Welcome) and self.session.installed is None:
                root, ref = message.manifest.root, message.manifest.ref
                self.act(self.session.received(message, self.now))
                self.session.progress = Progress(max_leases=1, free=1)
                installed = Installed(ref, root, True, InstallSource.ZMQ, 0.0, 0.0, 0.0, 0.0, 0, "")
                self.act(self.session.report_installed(installed, self.now))
            else:
                self.act(self.session.received(message, self.now))

    def group(self) -> Group:
        """What its first lease asks for."""
        (lease,) = self.leases[:1]
        return FakeActor(ledger=None, actor_id="a1", ref=lease.min_version).group(lease)


@pytest.fixture
def actor(tmp_path):
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, tiny_model(tmp_path / "model"))
        one = StoppedClock(hub)
        one.act(one.session.start(one.now))
        one.until(lambda: bool(one.leases))
        one.session.progress = Progress(max_leases=1, held=(one.leases[0].ref,))
        yield one
        one.socket.close(linger=0)


def once(place: int) -> Callable[[bytes], bytes]:
    """Flips a bit of the next frame."""
    flips = [place]

    def damage(frame: bytes) -> bytes:
        at = flips.pop() if flips else -1
        return frame if at < 0 else frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]

    return damage


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_group_that_arrives_damaged_is_sent_again_without_waiting(actor: StoppedClock, place: int):
    actor.damage = once(place)
    actor.act(actor.session.submit(actor.group(), actor.now))
    assert not actor.session.outbox.all_settled()
    actor.session.progress = Progress(max_leases=1)

    actor.until(actor.session.outbox.all_settled)

    assert [stop.reason.name for stop in actor.stops] == ["NO_LINK"] and actor.session.linked
    assert actor.stops[0].detail.startswith("a damaged message came")


def test_three_damaged_frames_in_a_minute_are_answered_by_an_eviction(actor: StoppedClock):
    for number in range(3):
        actor.damage = once(PLACES["body"])
        actor.act(actor.session.report_nccl(actor.session.nccl, actor.now))
        actor.until(lambda number=number: len(actor.stops) > number and actor.session.linked)

    assert [stop.reason.name for stop in actor.stops] == ["NO_LINK", "NO_LINK", "EVICTED"]


def test_an_actor_that_drains_is_not_sent_away_for_a_damaged_frame(actor: StoppedClock):
    actor.act(actor.session.drain("test", actor.now))
    actor.damage = once(PLACES["body"])
    actor.act(actor.session.submit(actor.group(), actor.now))
    actor.session.progress = Progress(max_leases=1)
    sent_before, actor.num_groups_sent = actor.num_groups_sent, 0
    while not actor.num_groups_sent:  # the time-out of the ack sends it again
        actor.now += 1.0
        actor.act(actor.session.tick(actor.now))
        actor.until(lambda before=actor.num_heard: actor.num_heard > before)  # each heartbeat has an answer
    actor.until(actor.session.outbox.all_settled)  # in real time: the hub writes the group to its log before

    assert sent_before == 1
    assert actor.stops == [] and not any(one.exit_code for one in actor.closed)
