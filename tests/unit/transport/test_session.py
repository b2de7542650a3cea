"""The actor's protocol without a socket: time is an argument, effects are values."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.messages import (
    TO_HUB,
    Ack,
    ActorHeartbeat,
    ActorState,
    Bye,
    Drain,
    Group,
    Hello,
    HubHeartbeat,
    Installed,
    Leases,
    Limits,
    Rejection,
    RejectReason,
    Sampling,
    Stop,
    StopReason,
    VersionRef,
    Welcome,
)
from streamrl.messages.codec import Decoder
from streamrl.transport.outbox import MARGIN
from streamrl.transport.session import MAX_UNSETTLED, ActorSession, Deliver, Disconnected, LinkClosed, Progress, Send
from tests.unit.messages.examples import example_of

LIMITS = Limits(outbox_groups=100)


def make_link(**options: object) -> ActorSession:
    return ActorSession("a1", 77, engine="scripted", max_leases=4, transports=("shm",), software="test", **options)


def sent(effects: list) -> list:
    decoder = Decoder(TO_HUB)
    return [decoder.decode(effect.frame) for effect in effects if isinstance(effect, Send)]


def welcome(epoch: int = 1, **fields: object) -> Welcome:
    base = Welcome(
        protocol=1, run_id="r", learner_epoch=epoch, version=0, lineage=(), limits=LIMITS, task=b"{}", layout=None,
        manifest=None, offers=(), pull_token=bytes(16), assets_nbytes=0, assets_digest=bytes(16), settled_upto=0,
        settled=(), durable_upto=0, durable=(), held=(),
    )
    return msgspec.structs.replace(base, **fields)


def group(group_id: int = 0) -> Group:
    return Group(0, 0, group_id, 0, 2, 4, "", Sampling(), (), {})


def ack(settled: int = 0, durable: int = 0, rejected: tuple = ()) -> Ack:
    return Ack(77, settled, (), durable, (), rejected)


def installed(version: int) -> Installed:
    return Installed(VersionRef(1, version), bytes(16), True, 1, 0, 0, 0, 0, 0, "")


def linked() -> ActorSession:
    link = make_link()
    link.start(0.0)
    link.received(welcome(), 0.1)
    link.report_installed(installed(0), 0.2)
    return link


def test_it_says_hello_until_it_is_welcome():
    link = make_link()
    assert isinstance(sent(link.start(0.0))[0], Hello)

    hellos = sum(len(sent(link.tick(t / 10))) for t in range(1, 50))

    assert hellos >= 5 and link.state is ActorState.CONNECTING
    link.received(welcome(), 6.0)
    assert link.state is ActorState.SYNCING


def test_hello_backoff_is_capped_so_a_hub_that_comes_back_late_is_still_found():
    link = make_link()
    link.start(0.0)
    times = [t / 20 for t in range(1, 4000) if sent(link.tick(t / 20))]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert max(gaps) <= 5.1 and times[-1] > 190


def test_it_takes_no_leases_before_a_version_is_installed():
    link = make_link()
    link.progress = Progress(free=4)
    link.start(0.0)
    beats = sent(link.received(welcome(), 0.1))
    assert beats[0].free == 0
    beats = sent(link.report_installed(installed(0), 0.2))
    assert isinstance(beats[0], Installed) and beats[1].free == 4 and link.state is ActorState.RUNNING


def test_a_group_stays_in_the_outbox_until_it_is_durable():
    link = linked()
    link.submit(group(), 1.0)
    link.received(ack(settled=1), 1.1)
    assert len(link.outbox) == 1 and link.outbox.all_settled()
    link.received(ack(settled=1, durable=1), 1.2)
    assert len(link.outbox) == 0


def test_a_rejected_group_is_forgotten():
    link = linked()
    link.submit(group(), 1.0)
    link.received(ack(rejected=(Rejection(1, 2, "stale"),)), 1.1)
    assert len(link.outbox) == 0


def test_an_unanswered_group_is_sent_again_byte_for_byte():
    link = linked()
    first = [e.frame for e in link.submit(group(), 1.0) if isinstance(e, Send)]
    link.received(HubHeartbeat(1, 1, 0, VersionRef(1, 0), ""), 6.0)
    again = [e.frame for e in link.tick(6.5) if isinstance(e, Send) and bytes(e.frame[6:7]) == b"\x04"]
    assert again == first


def test_after_a_lost_link_everything_unsettled_is_sent_again_in_order():
    link = linked()
    for i in range(3):
        link.submit(group(i), 1.0)
    link.received(ack(settled=1), 1.1)

    effects = link.received(Stop(StopReason.NO_LINK, True, 0.0, 0, ""), 1.2)
    assert isinstance(sent(effects)[0], Hello) and sent(effects)[0].outbox == ((1, 3),)

    again = [m for m in sent(link.received(welcome(settled_upto=1), 1.3)) if isinstance(m, Group)]
    assert [m.seq for m in again] == [2, 3]


def test_a_new_learner_epoch_gets_what_the_dead_one_had_only_accepted():
    link = linked()
    for i in range(2):
        link.submit(group(i), 1.0)
    link.received(ack(settled=2), 1.1)
    link.tick(10.0)
    again = [m.seq for m in sent(link.received(welcome(epoch=2), 10.1)) if isinstance(m, Group)]
    assert again == [1, 2]


def test_a_silent_hub_is_noticed_and_generation_is_told():
    link = linked()
    effects = link.tick(0.2 + LIMITS.hub_silent_s + 0.1)
    assert Deliver(Disconnected()) in effects and link.state is ActorState.DISCONNECTED
    assert not link.tick(3.5) or isinstance(sent(link.tick(4.0) or link.tick(8.0))[0], Hello)


def test_a_full_outbox_asks_for_no_more_work():
    link = linked()
    link.progress = Progress(free=4)
    for i in range(LIMITS.outbox_groups - MARGIN):
        link.submit(group(i), 1.0)
    beat = [m for m in sent(link.tick(2.0)) if isinstance(m, ActorHeartbeat)][0]
    assert link.outbox.full and beat.free == 0


def test_only_a_window_of_groups_is_in_flight():
    link = linked()
    frames = [m for i in range(MAX_UNSETTLED + 5) for m in sent(link.submit(group(i), 1.0))]
    assert len(frames) == MAX_UNSETTLED
    more = sent(link.received(ack(settled=10), 1.1))
    assert [m.seq for m in more] == list(range(MAX_UNSETTLED + 1, MAX_UNSETTLED + 6))


def test_draining_waits_until_every_group_is_settled_then_sends_bye():
    link = linked()
    link.submit(group(), 1.0)
    assert isinstance(sent(link.drain("test", 1.1))[0], Drain)
    assert not [m for m in sent(link.tick(1.2)) if isinstance(m, Bye)]
    assert [m for m in sent(link.received(ack(settled=1), 1.3)) if isinstance(m, Bye)]
    assert link.received(Bye(1, ""), 1.4) == [LinkClosed(0, "left cleanly")]


def test_a_hub_that_never_answers_bye_does_not_hold_the_actor():
    link = linked()
    link.drain("test", 1.0)
    gone = [e for t in range(10, 120) for e in link.tick(t / 10) if isinstance(e, LinkClosed)]
    assert len(gone) == 1 and gone[0].exit_code == 0


def test_leases_for_a_parted_actor_are_not_delivered():
    link = linked()
    link.tick(10.0)
    assert link.received(Leases(), 10.1) == []


@pytest.mark.parametrize(
    ("reason", "code"),
    [(StopReason.FINISHED, 0), (StopReason.FENCED, 3), (StopReason.WRONG_RUN, 6), (StopReason.EVICTED, 7)],
)
def test_a_final_stop_ends_with_the_code_that_the_hub_names(reason, code):
    link = linked()
    effects = link.received(Stop(reason, False, 0.0, code, "why"), 1.0)
    assert effects[-1] == LinkClosed(code, "why") and link.tick(100.0) == []


def ends_after(num: int, *, every_s: float, answers: int, rejected: tuple = ()) -> bool:
    """True if so many evictions end an actor that sends a group of so many answers after each."""
    link, ended = linked(), False
    (member,) = example_of(Group).members[:1]
    for i in range(num):
        at = 1.0 + i * every_s
        ended = isinstance(link.received(Stop(StopReason.EVICTED, True, 0, 1, ""), at)[-1], LinkClosed)
        link.received(welcome(settled_upto=i), at + 0.1)
        link.submit(msgspec.structs.replace(group(i), members=(member,) * answers), at + 0.2)
        link.received(ack(settled=i + 1, rejected=tuple(Rejection(i + 1, one, "") for one in rejected)), at + 0.3)
    return ended


def test_three_evictions_in_an_hour_end_an_actor_of_whose_work_nothing_is_kept():
    assert ends_after(3, every_s=1.0, answers=0) and not ends_after(2, every_s=1.0, answers=0)
    assert ends_after(3, every_s=1.0, answers=1, rejected=(RejectReason.MALFORMED,))
    assert ends_after(3, every_s=1700.0, answers=0)


def test_evictions_of_a_long_run_end_no_actor_that_works():
    assert not ends_after(50, every_s=1.0, answers=1)
    assert not ends_after(50, every_s=1801.0, answers=0), "a relay delivers nothing"


@pytest.mark.shows("actors.give_up_after_s")
def test_it_gives_up_only_when_told_to():
    patient, impatient = make_link(), make_link(give_up_after_s=2.0)
    patient.start(0.0)
    impatient.start(0.0)
    assert not [e for t in range(1, 1000) for e in patient.tick(float(t)) if isinstance(e, LinkClosed)]
    assert [e for t in range(1, 10) for e in impatient.tick(float(t)) if isinstance(e, LinkClosed)]


ACTIONS = ("submit", "ack", "durable", "nolink", "welcome", "newepoch", "tick", "silence")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 30)), max_size=60))
def test_no_submitted_group_ever_disappears_before_it_is_durable(script):
    """Model: the set of seqs that were submitted and never made durable must be exactly the outbox."""
    link, now, owed, epoch = linked(), 1.0, set(), 1
    for action, number in script:
        now += 0.3
        match action:
            case "submit":
                owed.add(link.outbox.next_seq)
                link.submit(group(number), now)
            case "ack":
                link.received(ack(settled=number), now)
            case "durable":
                link.received(ack(settled=number, durable=number), now)
                owed = {seq for seq in owed if seq > number}
            case "nolink":
                link.received(Stop(StopReason.NO_LINK, True, 0, 0, ""), now)
            case "welcome" | "newepoch":
                epoch += action == "newepoch"
                link.received(welcome(epoch), now)
            case "tick":
                link.tick(now)
            case "silence":
                now += 20
                link.tick(now)
        held = {seq for first, last in link.outbox.seq_ranges() for seq in range(first, last + 1)}
        assert held == owed
