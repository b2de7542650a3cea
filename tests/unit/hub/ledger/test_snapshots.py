"""What a crash may cost, and what it may not."""

import pytest

from learner.hub.ledger.ledger import Ledger
from streamrl.errors import CheckpointError
from streamrl.messages import Lineage, RejectReason, VersionRef
from streamrl.stream.records import GroupArrived
from tests.unit.hub.factories import (
    FakeActor,
    ledger_arguments,
    log_of,
    make_ledger,
    one_actor,
    restart,
    settings,
    train,
)


def test_a_group_is_durable_with_its_own_record_and_not_with_the_one_before():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1)
    before = log_of(ledger)[-1][0]
    actor.finish(leases[0])
    (arrival,) = [sequence for sequence, record in log_of(ledger) if isinstance(record, GroupArrived)]
    actor.take_acks()

    for sequence in range(before, arrival):
        ledger.logged(sequence)
        assert actor.take_acks() == []
    ledger.logged(arrival)

    assert actor.take_acks()[0].durable_upto == 1


def test_tokens_of_a_dead_branch_are_refused_and_the_lineage_says_why():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1)
    state = ledger.freeze(0)
    actor.finish(leases[0])
    actor.outbox.clear()  # the log had it
    train(ledger)
    actor.install(1)
    (extra,) = actor.ask()
    dead = actor.group(extra)

    successor = actor.ledger = restart(ledger, state)
    actor.join()

    assert successor.versions.lineage == (Lineage(1, 0, 0), Lineage(2, 0, 0))
    assert actor.send(dead).reason is RejectReason.VERSION
    assert actor.ask() == []  # weights of the dead branch earn no lease
    actor.install(0, epoch=2)
    assert actor.ask() != []


def test_leases_wait_a_moment_for_their_actors_then_go_to_others():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1, dead_after_s=3.0)
    successor = restart(ledger, ledger.freeze(0))
    other = FakeActor(successor, "a2", ref=VersionRef(2, 0))

    other.join(100.0)
    assert other.ask(101.0) == []
    granted = other.ask(103.0)

    assert [lease.ref for lease in granted] == [(lease.group_id, 1) for lease in leases]
    assert [lease.seeds for lease in granted] == [lease.seeds for lease in leases]
    assert successor.counters()["lost_on_crash"] == 2


def test_leases_wait_while_actors_of_the_run_before_come_back_one_after_another_but_not_forever():
    ledger, first, _ = one_actor(groups_per_batch=1, eta=1, dead_after_s=3.0)
    others = [FakeActor(ledger, f"b{number}") for number in range(9)]
    for one in others:
        one.join()
    state = ledger.freeze(0)
    first.ledger = restart(ledger, state)
    for number, one in enumerate(others):
        one.ledger = first.ledger
        one.join(100.0 + 2.0 * number)
        assert one.ask(100.0 + 2.0 * number) == [], "work of an actor that may still come was given away"

    result = first.join(117.0)

    assert result.held == tuple((ref, True) for ref in first.leases)
    assert first.ledger.counters()["lost_on_crash"] == 0
    late = restart(ledger, state)
    for number, one in enumerate(others):
        one.ledger = late
        one.join(100.0 + 2.0 * number)
    assert others[0].ask(117.9) == []
    assert len(others[0].ask(118.0)) > 0, "six times dead_after_s after the first HELLO the rest are presumed dead"


def test_groups_that_an_actor_still_has_to_send_are_not_leased_to_it_again():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1, dead_after_s=3.0)
    state = ledger.freeze(0)
    sent = [actor.group(lease) for lease in leases]
    actor.leases.clear()  # it has finished them

    actor.ledger = restart(ledger, state)
    actor.join(100.0)
    actor.ref = VersionRef(2, 0)
    assert actor.ask(100.1) == []
    assert [actor.send(one, 100.2).kind for one in sent] == ["accepted"] * len(leases)
    assert actor.ledger.counters()["lost_on_crash"] == actor.ledger.counters()["num_duplicates_dropped"] == 0


def test_an_actor_that_returns_in_time_keeps_its_leases():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1)

    actor.ledger = restart(ledger, ledger.freeze(0))
    result = actor.join()

    assert result.held == tuple((lease.ref, True) for lease in leases)
    assert actor.finish(leases[1]).kind == "accepted"


def test_everything_saved_is_forgotten_so_the_tables_stay_small():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1)
    for _ in range(50):
        for lease in leases:
            actor.finish(lease)
        train(ledger)
        ledger.freeze(ledger.version), ledger.saved(ledger.version)
        actor.install(ledger.version)
        actor.take_acks()
        leases = actor.ask()

    assert ledger.groups.done_below == 50 and len(ledger.groups.settled) == 0
    assert len(ledger.freeze(50)) < 4000


@pytest.mark.parametrize(
    "changes, words",
    [(dict(run_id="other"), "belongs to run run"), (dict(learner_epoch=0), "learner_epoch 0 is below 1")],
    ids=["run", "epoch"],
)
def test_a_foreign_ledger_is_refused(changes, words):
    ledger = make_ledger()
    with pytest.raises(CheckpointError, match=words):
        Ledger.restore(ledger.freeze(0), ledger.settings, **ledger_arguments(**{"learner_epoch": 2, **changes}))


def test_bytes_that_are_no_ledger_are_refused():
    with pytest.raises(CheckpointError, match="cannot be read"):
        Ledger.restore(b"\x93\x01\x02", settings(), **ledger_arguments(learner_epoch=2))


def test_freezing_at_another_version_or_saving_what_was_not_frozen_is_an_error():
    ledger = make_ledger()
    with pytest.raises(ValueError, match="the ledger is at version 0"):
        ledger.freeze(3)
    ledger.freeze(0)
    with pytest.raises(ValueError, match="never frozen"):
        ledger.saved(1)
