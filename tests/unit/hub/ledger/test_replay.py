"""The ledger that checkpoint and log give is the one that died, at whichever record that was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.groups import GroupState
from streamrl.errors import CheckpointError
from streamrl.stream.records import BatchCut, GroupArrived, GroupMoved, Record, StepTaken
from tests.unit.hub.factories import (
    FakeActor,
    cut,
    end_batch,
    ledger_arguments,
    log_of,
    make_ledger,
    publish,
    restart,
    settings,
    train,
)
from tests.unit.hub.ledger.test_ledger_machine import SEED, random_settings
from tests.unit.hub.simulator import MOVES, SHAPES, World

Log = list[tuple[int, Record]]
FAULTS = (
    "lose_link", "lose_leases", "silence", "evict", "leave", "die", "restart", "resend", "checkpoint", "cut", "skip",
    "publish_first", "late", "stuck", "publish_inside", "sync",
)
"""All but the crash, which is what is tested, and the bounds, which a real learner sends with its steps."""
NUM_WALKS = 60


@dataclass
class Moment:
    """A ledger as it was between two messages: all that the log promises to bring back."""

    sequence: int
    state: bytes
    groups: dict[str, Any]
    last: Ledger


def what_survives(ledger: Ledger) -> dict[str, Any]:
    """Groups, batches and versions, without what is allowed to die: leases, and whatever was never told durable."""
    asleep = {GroupState.LEASED: GroupState.READY}
    live = {
        record.group_id: (
            asleep.get(record.state, record.state).name, sorted(record.members), tuple(map(bytes, record.frames)),
            tuple(record.sequences), record.lease.actor_id if record.lease is not None else record.holder,
            [(one.actor_id, one.incarnation, one.seq) for one in record.deliveries], record.next_attempt,
        )
        for record in ledger.groups.in_order()
    }
    return {
        "live": live, "next_id": ledger.groups.next_id, "version": ledger.version,
        "ended": {
            group_id: (row.state.name, row.reason) for group_id, row in ledger.groups.settled.items()
        },
        "in_flight": [
            (version, [record.group_id for record in batch]) for version, batch in ledger.cutter.in_flight
        ],
        "trained": (ledger.groups.num_trained, ledger.groups.num_dropped), "cursor": ledger.prompts.cursor,
        "published": ledger.versions.newest_published, "next_sequence": ledger.journal.next_sequence,
    }


def restored(world: World, state: bytes | None, log: Log, *, with_epoch: int = 1) -> Ledger:
    arguments = ledger_arguments(learner_epoch=with_epoch, keep_group=world.ledger.lifecycle.keep_group)
    return Ledger.restore(state, world.settings, records=_from(log), **arguments)


def _from(log: Log) -> Callable[[int], Iterable[tuple[int, Record]]]:
    return lambda first: [one for one in log if one[0] >= first]


def walk(number: int, look: Callable[[World, int], None]) -> World:
    """Work and faults; `look` sees the world after every event."""
    rng = Random(f"{SEED}/replay/{number}")
    world = World(random_settings(rng, number % 3 == 0), with_filter=rng.random() < 0.5)
    names = ["a0", "a1", "a2"]
    for name in names:
        world.join(name)
    for event in range(150):
        if rng.random() < 0.12:
            world.fault(rng.choice(FAULTS), rng.choice(names), rng.randrange(6))
        elif rng.random() < 0.1:
            world.tick(rng.choice([0.5, 1.0, 4.0]))
        else:
            shape = rng.choice(SHAPES) if rng.random() < 0.3 else "whole"
            world.move(rng.choice(names), rng.choice(MOVES), rng.randrange(6), shape)
        look(world, event)
    return world


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What differs, in words; "" if nothing does."""
    lines = []
    for key in before:
        if before[key] == after[key]:
            continue
        if key in ("live", "ended"):
            # A group that ended may be forgotten once a checkpoint has its end; one table knows that, the other not.
            known = {*before[key], *after[key]} if key == "live" else before[key].keys() & after[key].keys()
            groups = [one for one in known if before[key].get(one) != after[key].get(one)]
            lines += [f"{key} {one}: {before[key].get(one)} became {after[key].get(one)}" for one in sorted(groups)]
        else:
            lines.append(f"{key}: {before[key]} became {after[key]}")
    return "\n".join(lines)


def test_a_ledger_that_dies_between_two_messages_is_the_same_one_after_its_restoration():
    num_compared = 0

    def compare(world: World, event: int) -> None:
        nonlocal num_compared
        if event % 15:
            return
        log, (_, state, *_) = log_of(world.ledger), world.saved
        for start in (state, None):
            copy = restored(world, start, log)
            found = difference(what_survives(world.ledger), what_survives(copy))
            assert not found, f"STREAMRL_SEED={SEED}, walk {number}, event {event}:\n{found}"
            _check_answers(copy, log)
            copy.check()
            num_compared += 1

    for number in range(NUM_WALKS):
        walk(number, compare)
    assert num_compared == 2 * 10 * NUM_WALKS


def _check_answers(ledger: Ledger, log: Log) -> None:
    """A delivery that the log has is a repeat, and durable."""
    for _, record in log:
        if isinstance(record, GroupArrived):
            entry = ledger.dedup.get(record.actor_id, record.incarnation)
            assert entry is None or (entry.place(record.seq) == "repeat" and record.seq in entry.durable)


def test_a_log_that_ends_at_any_record_gives_a_ledger_that_works():
    for number in range(6):
        world = walk(number, lambda world, event: None)
        log = log_of(world.ledger)
        first = world.ledger.journal.next_sequence - len(log)
        for upto in range(first - 1, log[-1][0] + 1):
            copy = restored(world, None, [one for one in log if one[0] <= upto])
            copy.check()
            assert all(
                copy.lifecycle.missing(record) for record in copy.groups.in_state(GroupState.READY)
            ), f"a lease for nothing would follow record {upto}"
            trained = [one for one in log if one[0] <= upto and isinstance(one[1], StepTaken) and not one[1].skipped]
            assert copy.version == (trained[-1][1].version if trained else 0)


@pytest.mark.parametrize("kind", [BatchCut, StepTaken], ids=lambda kind: kind.__name__)
def test_a_log_that_lacks_one_batch_or_one_step_is_refused_or_gives_another_ledger(kind):
    """What would not be noticed here could be lost and never be missed."""
    num_lacking = 0
    for number in range(8):
        world = walk(number, lambda world, event: None)
        log = log_of(world.ledger)
        for lacking in [sequence for sequence, record in log if isinstance(record, kind)]:
            num_lacking += 1
            try:
                copy = restored(world, None, [one for one in log if one[0] != lacking])
            except CheckpointError:
                continue
            found = difference(what_survives(world.ledger), what_survives(copy))
            assert found, f"walk {number}: record {lacking} was not missed"
    assert num_lacking > 20


# --- single cases -----------------------------------------------------------------------------------------------------


def started(**changes: object) -> tuple[Ledger, FakeActor, list]:
    ledger = make_ledger(**{"groups_per_batch": 1, "eta": 1, **changes})
    publish(ledger, ledger.versions.ref)
    actor = FakeActor(ledger, "a1")
    actor.join()
    return ledger, actor, actor.ask()


def again(ledger: Ledger, upto: int | None = None) -> Ledger:
    return restart(ledger, None, upto=log_of(ledger)[-1][0] if upto is None else upto, equal=True, publishes=False)


def test_a_lease_ends_with_its_hub_and_its_actor_may_come_back_with_it():
    ledger, actor, leases = started()

    successor = actor.ledger = again(ledger)

    record = successor.groups.live[leases[0].group_id]
    assert (record.state, record.holder, record.next_attempt) == (GroupState.READY, "a1", leases[0].attempt + 1)
    assert actor.join().held == tuple((lease.ref, True) for lease in leases)
    assert actor.finish(leases[1]).kind == "accepted"


def test_a_group_whose_last_member_came_with_the_last_record_is_held():
    ledger, actor, (lease, *_) = started()
    actor.finish(lease)
    (arrival,) = [sequence for sequence, record in log_of(ledger) if isinstance(record, GroupArrived)]

    successor = again(ledger, arrival)

    assert [record.group_id for record in successor.groups.in_state(GroupState.HELD)] == [lease.group_id]
    moved = [record for _, record in log_of(successor)[arrival:] if isinstance(record, GroupMoved)]
    assert [(one.group_id, one.state) for one in moved] == [(lease.group_id, GroupState.HELD)]
    assert train(successor) == [lease.group_id]


def test_a_group_is_judged_by_the_bound_of_its_lease_also_after_a_crash():
    ledger, actor, leases = started(eta=1, window=0, max_lag=4)
    ledger.lag.set_bounds(0, 0)

    successor = again(ledger)

    assert successor.groups.live[leases[0].group_id].max_lag == 4
    assert {one.max_lag for _, one in log_of(ledger) if isinstance(one, GroupMoved)} == {4}


def test_a_batch_whose_end_the_log_does_not_know_is_in_flight_and_ends_once():
    ledger, actor, leases = started()
    actor.finish(leases[0])
    assert cut(ledger) is not None

    successor = again(ledger)

    assert [version for version, _ in successor.cutter.in_flight] == [0] and successor.version == 0
    end_batch(successor, 1)
    assert successor.version == 1 and successor.groups.num_trained == 1
    third = restart(successor, None, upto=log_of(successor)[-1][0], equal=True, publishes=False)
    assert third.version == 1 and not third.cutter.in_flight


def test_a_refused_group_is_remembered_by_its_digest_alone_unless_its_frame_is_asked_for():
    for keeps in (False, True):
        ledger, actor, leases = started(eta=1, window=0, max_lag=1, keep_refused=keeps)
        late = actor.group(leases[1], versions=[(1, 0)])
        for lease in (leases[0],):
            actor.finish(lease)
        train(ledger)
        ledger.lag.set_bounds(0, 0)
        actor.install(1)
        ledger.groups.live[leases[1].group_id].max_lag = 0
        assert actor.send(late).kind == "rejected"
        refused = [one for _, one in log_of(ledger) if isinstance(one, GroupArrived) and one.refused]
        assert [(one.refused, bool(one.frame), bool(one.digest)) for one in refused] == [("stale", keeps, not keeps)]


def test_a_log_of_other_groups_is_refused_with_the_number_of_its_record():
    ledger, actor, leases = started()
    actor.finish(leases[0])
    train(ledger)
    log = [one for one in log_of(ledger) if not isinstance(one[1], GroupArrived)]
    (at,) = [sequence for sequence, record in log if isinstance(record, BatchCut)]

    with pytest.raises(CheckpointError, match=f"record {at} of the log cuts a batch at version 0 of 1 groups"):
        Ledger.restore(None, settings(groups_per_batch=1), records=_from(log), **ledger_arguments())
