"""When acks go out: at once for an actor with many groups open, otherwise with the news of the log or after a while."""

import pytest

from learner.hub.handlers import actors
from streamrl.messages import Ack, Installed, InstallSource
from streamrl.messages.codec import Decoder
from tests.contract.protocol_session import Session, answer_to


@pytest.fixture
def session(tmp_path):
    """An actor whose only lease is finished, and the hub that has its answers."""
    one = Session(tmp_path)
    one.publish(0)
    one.by_actor(one.actor.start(one.now))
    one.actor.progress.free = one.actor.progress.max_leases = 1
    manifest = one.welcome.manifest
    source = InstallSource.ZMQ
    one.by_actor(one.actor.report_installed(
        Installed(manifest.ref, manifest.root, True, source, 0.0, 0.0, 0.0, 0.0, 24, ""), one.now
    ))
    one.handler.grant(one.now)
    one.handler.flush_acks(one.now)  # the time of an ack begins
    yield one
    one.close()


def acks(one: Session) -> list[Ack]:
    decoder = Decoder({Ack.KIND: Ack})
    return [decoder.decode(frame) for way, frame, _, _ in one.frames if way == "hub to actor" and frame[6] == Ack.KIND]


def submit(one: Session) -> None:
    one.by_actor(one.actor.submit(answer_to(one.leases[0], one.welcome.manifest.ref), one.now))


@pytest.mark.parametrize(("every", "num"), [(actors.ACK_EVERY, 0), (1, 1)])
def test_an_actor_with_as_many_groups_open_is_acknowledged_without_a_wait(session, monkeypatch, every, num):
    monkeypatch.setattr(actors, "ACK_EVERY", every)
    submit(session)
    assert len(acks(session)) == num


def test_an_ack_waits_for_the_log_and_at_most_for_its_time(session):
    submit(session)
    session.now += actors.LEAST_FLUSH_S
    session.handler.flush_acks(session.now)
    assert acks(session) == [], "nothing is on the disk that was not before"
    session.now += actors.ACK_FLUSH_S
    session.handler.flush_acks(session.now)
    assert [(one.settled_upto, one.durable_upto) for one in acks(session)] == [(1, 0)]


def test_the_log_and_the_acceptance_are_told_in_one_ack(session):
    submit(session)
    session.now += actors.LEAST_FLUSH_S
    session.sync()
    assert [(one.settled_upto, one.durable_upto) for one in acks(session)] == [(1, 1)]
