"""What a crash may cost, and what it may not."""

from __future__ import annotations

import pytest

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.groups import GroupState
from streamrl.errors import CheckpointError
from streamrl.messages import Lineage, RejectReason, VersionRef
from streamrl.stream.records import GroupArrived
from tests.unit.hub.factories import (
    FakeActor,
    cut,
    end_batch,
    held_groups,
    ledger_arguments,
    log_of,
    make_ledger,
    restart,
    settings,
    sync,
    train,
)


def started(**changes: object) -> tuple:
    ledger = make_ledger(**{"groups_per_batch": 1, "eta": 1, **changes})
    actor = FakeActor(ledger, "a1")
    actor.join()
    return ledger, actor, actor.ask()


def test_durable_means_that_the_record_is_on_the_disk_and_nothing_else_does():
    ledger, actor, leases = started()
    actor.finish(leases[0])
    on_disk = log_of(ledger)[-1][0]
    actor.finish(leases[1])
    train(ledger)
    ledger.freeze(1), ledger.saved(1)

    assert actor.take_acks()[0].durable_upto == 0 and len(actor.outbox) == 2
    ledger.logged(on_disk)

    assert actor.take_acks()[0].durable_upto == 1
    assert list(actor.outbox) == [2]
    sync(ledger)
    assert actor.take_acks()[0].durable_upto == 2 and actor.outbox == {}


def test_a_group_is_durable_with_its_own_record_and_not_with_the_one_before():
    ledger, actor, leases = started()
    before = log_of(ledger)[-1][0]
    actor.finish(leases[0])
    (arrival,) = [sequence for sequence, record in log_of(ledger) if isinstance(record, GroupArrived)]
    actor.take_acks()

    for sequence in range(before, arrival):
        ledger.logged(sequence)
        assert actor.take_acks() == []
    ledger.logged(arrival)

    assert actor.take_acks()[0].durable_upto == 1


def test_a_checkpoint_that_failed_is_covered_by_the_next_one():
    ledger, actor, leases = started()
    actor.finish(leases[0])
    train(ledger)
    ledger.freeze(1)  # never saved
    actor.finish(leases[1])
    train(ledger)

    ledger.freeze(2), ledger.saved(2)

    assert ledger.groups.done_below == 2 and ledger.groups.settled == {}
    with pytest.raises(ValueError, match="never frozen"):
        ledger.saved(1)


@pytest.mark.parametrize("from_checkpoint", [True, False])
def test_a_trained_group_is_never_trained_again_after_a_restart(from_checkpoint):
    ledger, actor, leases = started()
    state = ledger.freeze(0)
    group = actor.group(leases[0])
    actor.send(group)
    train(ledger)
    end = log_of(ledger)[-1][0]  # on the disk, but the hub died before its DURABLE went out

    successor = actor.ledger = restart(ledger, ledger.freeze(1) if from_checkpoint else state, upto=end)
    result = actor.join()

    assert successor.version == 1
    assert result.durable_upto == 1 and actor.outbox == {}
    assert actor.send(group).kind == "repeat"


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_a_held_group_whose_record_is_on_the_disk_is_trained_after_a_crash_though_its_actor_forgot_it(with_snapshot):
    ledger, actor, leases = started()
    state = ledger.freeze(0) if with_snapshot else None
    group = actor.group(leases[0], rewards=[0.25, 0.5])
    actor.send(group)
    before = held_groups(ledger)
    sync(ledger)
    actor.take_acks()
    assert actor.outbox == {}

    successor = restart(ledger, state, upto=log_of(ledger)[-1][0])

    assert held_groups(successor) == before
    assert train(successor) == [0]


@pytest.mark.parametrize("equal", [True, False])
def test_the_steps_after_a_checkpoint_are_in_the_log_and_none_is_lost(equal):
    ledger, actor, leases = started()
    state = ledger.freeze(0)
    actor.finish(leases[0])
    train(ledger)
    actor.install(1)
    actor.finish(leases[1])
    assert [group.group_id for group in cut(ledger)] == [1]  # its step never ended

    successor = actor.ledger = restart(ledger, state, upto=log_of(ledger)[-1][0], equal=equal, publishes=False)

    assert successor.version == 1 and successor.versions.learner_epoch == (1 if equal else 2)
    assert successor.versions.known(1, 2), "it is trained again before anything else: these weights come back"
    end_batch(successor, 2)
    assert [(row.group_id, row.state) for row in successor.groups.settled.values()] == [
        (0, GroupState.TRAINED), (1, GroupState.TRAINED)
    ]
    actor.join()
    assert actor.ref == VersionRef(1, 1) and actor.ask() != []


def test_what_was_accepted_and_is_not_in_the_log_is_sent_again_and_trained():
    ledger, actor, leases = started()
    state = ledger.freeze(0)
    groups = [actor.group(lease) for lease in leases]
    for group in groups:
        actor.send(group)

    successor = actor.ledger = restart(ledger, state)
    actor.join()

    assert [actor.send(group).kind for group in groups] == ["accepted", "accepted"]
    assert train(successor) == [0]


def test_held_groups_and_their_bytes_survive():
    ledger, actor, leases = started()
    actor.finish(leases[0], rewards=[0.25, 0.5])
    before = held_groups(ledger)
    ledger.cut_batch(0)  # a batch that is cut counts as held if the log does not have it

    successor = restart(ledger, ledger.freeze(0))

    assert held_groups(successor) == before
    assert train(successor) == [0]


def test_tokens_of_a_dead_branch_are_refused_and_the_lineage_says_why():
    ledger, actor, leases = started()
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


def test_a_version_that_was_published_but_not_in_the_checkpoint_is_a_dead_branch():
    ledger, actor, leases = started()
    actor.finish(leases[0])
    ledger.cut_batch(0)
    ledger.versions.published(VersionRef(1, 1))

    successor = restart(ledger, ledger.freeze(0))

    assert ledger.versions.known(1, 1) and not successor.versions.known(1, 1)
    assert successor.versions.known(1, 0) and successor.versions.known(2, 0)


def test_an_actor_that_holds_surviving_weights_goes_on_under_their_old_name():
    ledger, actor, leases = started()
    ledger = actor.ledger = restart(ledger, ledger.freeze(0))

    actor.join()

    assert actor.ref == VersionRef(1, 0)
    assert actor.finish(leases[0]).kind == "accepted"


def test_no_burst_follows_a_restart():
    ledger, actor, leases = started(groups_per_batch=2)
    for lease in leases:
        actor.finish(lease)
    train(ledger)

    actor.ledger = restart(ledger, ledger.freeze(1))
    actor.leases, actor.ref = {}, VersionRef(2, 1)
    actor.join()

    assert len(actor.ask()) == 2  # (eta + n + 1) * B = 6 groups, of which 2 trained and 2 held


def test_leases_wait_a_moment_for_their_actors_then_go_to_others():
    ledger, actor, leases = started(dead_after_s=3.0)
    successor = restart(ledger, ledger.freeze(0))
    other = FakeActor(successor, "a2", ref=VersionRef(2, 0))

    other.join(100.0)
    assert other.ask(101.0) == []
    granted = other.ask(103.0)

    assert [lease.ref for lease in granted] == [(lease.group_id, 1) for lease in leases]
    assert [lease.seeds for lease in granted] == [lease.seeds for lease in leases]
    assert successor.counters()["lost_on_crash"] == 2


def test_leases_wait_while_actors_of_the_run_before_come_back_one_after_another_but_not_forever():
    ledger, first, _ = started(dead_after_s=3.0)
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
    ledger, actor, leases = started(dead_after_s=3.0)
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
    ledger, actor, leases = started()

    actor.ledger = restart(ledger, ledger.freeze(0))
    result = actor.join()

    assert result.held == tuple((lease.ref, True) for lease in leases)
    assert actor.finish(leases[1]).kind == "accepted"


def test_a_fenced_incarnation_stays_fenced_over_a_restart():
    ledger, old, _ = started()
    FakeActor(ledger, "a1", incarnation=12).join(1.0)

    old.ledger = restart(ledger, ledger.freeze(0))

    assert old.join().stop.exit_code == 3


def test_numbers_that_the_sender_forgot_do_not_hold_the_low_water_mark_down():
    ledger, actor, leases = started()
    state = ledger.freeze(0)
    actor.finish(leases[0], versions=[(1, 9)])  # rejected, hence forgotten by its sender
    actor.take_acks()

    actor.ledger = restart(ledger, state)

    assert actor.join().settled_upto == 1


def test_everything_saved_is_forgotten_so_the_tables_stay_small():
    ledger, actor, leases = started()
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


def test_a_lower_eta_after_a_restart_draws_nothing_until_the_lead_is_used_up():
    ledger, actor, leases = started(groups_per_batch=1, eta=1)
    arguments = ledger_arguments(learner_epoch=2)
    successor = Ledger.restore(
        ledger.freeze(0), settings(groups_per_batch=1, eta=0, window=0, max_lag=0), **arguments
    )
    actor.ledger = successor
    successor.versions.published(VersionRef(2, 0))

    actor.join()
    successor.check()

    assert actor.ask() == []


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


def test_freezing_at_another_version_is_an_error():
    with pytest.raises(ValueError, match="the ledger is at version 0"):
        make_ledger().freeze(3)
