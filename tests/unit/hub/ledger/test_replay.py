"""Logs that end anywhere or lack a record. `test_ledger_machine` compares what whole logs give, after every step."""

from random import Random

import pytest

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.groups import GroupState
from streamrl.errors import CheckpointError
from streamrl.stream.records import BatchCut, GroupArrived, GroupMoved, StepTaken
from tests.unit.hub.factories import ledger_arguments, log_of, one_actor, restart, settings, train
from tests.unit.hub.ledger.test_ledger_machine import SEED, random_settings
from tests.unit.hub.simulator import MOVES, SHAPES, World
from tests.unit.hub.survival import difference, durable_state, restored

FAULTS = (
    "lose_link", "lose_leases", "silence", "evict", "leave", "die", "restart", "resend", "checkpoint", "cut", "skip",
    "publish_first", "late", "stuck", "publish_inside", "sync",
)
"""All but the crash, which is what is tested, and the bounds, which a real learner sends with its steps."""


def walk(number: int) -> World:
    """Work and faults."""
    rng = Random(f"{SEED}/replay/{number}")
    world = World(random_settings(rng, number % 3 == 0), with_filter=rng.random() < 0.5)
    names = ["a0", "a1", "a2"]
    for name in names:
        world.join(name)
    for _ in range(150):
        if rng.random() < 0.12:
            world.fault(rng.choice(FAULTS), rng.choice(names), rng.randrange(6))
        elif rng.random() < 0.1:
            world.tick(rng.choice([0.5, 1.0, 4.0]))
        else:
            shape = rng.choice(SHAPES) if rng.random() < 0.3 else "whole"
            world.move(rng.choice(names), rng.choice(MOVES), rng.randrange(6), shape)
    return world


def test_a_log_that_ends_at_any_record_gives_a_ledger_that_works():
    for number in range(6):
        world = walk(number)
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
        world = walk(number)
        log = log_of(world.ledger)
        for lacking in [sequence for sequence, record in log if isinstance(record, kind)]:
            num_lacking += 1
            try:
                copy = restored(world, None, [one for one in log if one[0] != lacking])
            except CheckpointError:
                continue
            found = difference(durable_state(world.ledger), durable_state(copy))
            assert found, f"walk {number}: record {lacking} was not missed"
    assert num_lacking > 20


# --- single cases -----------------------------------------------------------------------------------------------------


def again(ledger: Ledger, upto: int | None = None) -> Ledger:
    return restart(ledger, None, upto=log_of(ledger)[-1][0] if upto is None else upto, equal=True, publishes=False)


def test_a_group_whose_last_member_came_with_the_last_record_is_held():
    ledger, actor, (lease, *_) = one_actor(groups_per_batch=1, eta=1)
    actor.finish(lease)
    (arrival,) = [sequence for sequence, record in log_of(ledger) if isinstance(record, GroupArrived)]

    successor = again(ledger, arrival)

    assert [record.group_id for record in successor.groups.in_state(GroupState.HELD)] == [lease.group_id]
    moved = [record for _, record in log_of(successor)[arrival:] if isinstance(record, GroupMoved)]
    assert [(one.group_id, one.state) for one in moved] == [(lease.group_id, GroupState.HELD)]
    assert train(successor) == [lease.group_id]


def test_a_refused_group_is_remembered_by_its_digest_alone_unless_its_frame_is_asked_for():
    for keeps in (False, True):
        ledger, actor, leases = one_actor(groups_per_batch=1, eta=1, window=0, max_lag=1, keep_refused=keeps)
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
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1)
    actor.finish(leases[0])
    train(ledger)
    log = [one for one in log_of(ledger) if not isinstance(one[1], GroupArrived)]
    (at,) = [sequence for sequence, record in log if isinstance(record, BatchCut)]

    with pytest.raises(CheckpointError, match=f"record {at} of the log: a cut at version 0 of 1 groups"):
        Ledger.restore(None, settings(groups_per_batch=1), records=lambda first: log, **ledger_arguments())
