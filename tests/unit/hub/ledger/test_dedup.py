"""Dedupe tables and acks, against plain sets."""

from hypothesis import given
from hypothesis import strategies as st

from learner.hub.ledger.tables.dedup import MAX_FENCED, DedupEntry, DedupTable, SeqWindow, as_ranges, outbox_error
from streamrl.messages import Rejection, RejectReason
from tests.unit.hub.factories import STEADY

SEQS = st.lists(st.integers(1, 40), max_size=60)


@STEADY
@given(SEQS, st.integers(0, 45), SEQS)
def test_a_window_is_a_set(before, upto, after):
    window, truth = SeqWindow(), set()
    for seq in before:
        window.add(seq), truth.add(seq)
    window.raise_to(upto)
    truth |= set(range(1, upto + 1))
    for seq in after:
        window.add(seq), truth.add(seq)

    assert {seq for seq in range(1, 60) if seq in window} == truth
    assert window.upto == next(seq for seq in range(1, 60) if seq not in truth) - 1
    listed = {seq for first, last in window.ranges() for seq in range(first, last + 1)}
    assert listed == {seq for seq in truth if seq > window.upto}


@STEADY
@given(st.sets(st.integers(1, 60)))
def test_ranges_are_the_shortest_list_of_runs(seqs):
    ranges = as_ranges(sorted(seqs))

    assert {seq for first, last in ranges for seq in range(first, last + 1)} == seqs
    assert all(last + 1 < following for (_, last), (following, _) in zip(ranges, ranges[1:], strict=False))


@STEADY
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n)))))
def test_a_hello_settles_exactly_what_the_sender_has_forgotten(drawn):
    next_seq, kept = drawn
    outbox = as_ranges(sorted(seq for seq in kept if seq < next_seq))
    sender = DedupEntry("a1", 1, 1024)

    sender.forget_all_but(outbox, next_seq)

    listed = {seq for first, last in outbox for seq in range(first, last + 1)}
    assert {seq for seq in range(1, 80) if seq in sender.durable} == set(range(1, next_seq)) - listed


def test_a_hello_with_an_enormous_number_costs_nothing():
    sender = DedupEntry("a1", 1, 1024)

    sender.forget_all_but(((2**63 - 3, 2**63 - 2),), 2**63)

    assert sender.settled.upto == 2**63 - 4 and 2**63 - 1 in sender.settled


def test_an_outbox_wider_than_the_window_is_named():
    assert outbox_error(((1, 2), (4, 4)), 9, 8) is None
    assert "further than the window of 7" in outbox_error(((1, 2),), 9, 7)
    assert "must lie between 3 and 8" in outbox_error(((1, 2), (2, 4)), 9, 8)


def test_acks_say_each_thing_once_and_the_low_water_mark_always():
    sender = DedupEntry("a1", 1, 1024)
    sender.accept(1), sender.accept(3), sender.reject(5, RejectReason.STALE, "old")

    ack = sender.take_ack()

    assert (ack.settled_upto, ack.accepted, ack.rejected) == (1, ((3, 3),), (Rejection(5, 2, "old"),))
    assert sender.take_ack() is None
    sender.make_durable(3)
    assert (sender.take_ack().durable, sender.take_ack()) == (((3, 3),), None)


def test_what_does_not_fit_one_ack_follows_in_the_next():
    sender = DedupEntry("a1", 1, 1024)
    for seq in range(2, 1002, 2):
        sender.accept(seq)
    for seq in range(1003, 1023):
        sender.reject(seq, RejectReason.STALE, "")

    acks = []
    while (ack := sender.take_ack()) is not None:
        acks.append(ack)

    accepted = [seq for ack in acks for first, last in ack.accepted for seq in range(first, last + 1)]
    assert accepted == list(range(2, 1002, 2)) and max(len(ack.accepted) for ack in acks) == 256


def test_a_repeat_of_a_durable_number_says_durable_again():
    sender = DedupEntry("a1", 1, 1024)
    sender.accept(2), sender.make_durable(2)
    sender.take_ack()

    sender.repeat(2)

    assert (sender.take_ack().durable, sender.place(2), sender.place(1)) == (((2, 2),), "repeat", "new")


def test_a_fenced_sender_is_forgotten_after_two_checkpoints_but_stays_fenced():
    table = DedupTable(1024)
    table.open("a1", 1)
    assert table.open("a1", 2)[1] == 1

    table.saved()
    assert table.get("a1", 1) is not None
    table.saved()

    assert table.get("a1", 1) is None and table.is_fenced("a1", 1)
    assert len(table) == 1


def test_only_the_last_incarnations_are_remembered_as_fenced():
    table = DedupTable(1024)
    for incarnation in range(1, MAX_FENCED + 3):
        table.open("a1", incarnation)

    assert not table.is_fenced("a1", 1) and table.is_fenced("a1", MAX_FENCED + 1)


def test_a_snapshot_of_the_table_is_the_table():
    table = DedupTable(1024)
    sender, _ = table.open("a1", 7)
    for seq in (1, 2, 5, 900):
        sender.accept(seq)
    sender.make_durable(2)
    table.open("a2", 1), table.open("a2", 2)

    again = DedupTable(1024)
    again.load(table.rows(), table.fenced_rows())

    copy = again.get("a1", 7)
    assert [seq for seq in range(1, 1000) if seq in copy.settled] == [1, 2, 5, 900]
    # It is in a checkpoint, which the hub gives out only once the log has what was accepted by then.
    assert [seq for seq in range(1, 1000) if seq in copy.durable] == [1, 2, 5, 900]
    assert again.is_fenced("a2", 1) and again.open("a2", 3)[1] == 2
