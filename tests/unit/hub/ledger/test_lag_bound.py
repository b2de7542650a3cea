"""The bound S (eta + ceil(W / B)) + S - 1: met with equality by the ledger, broken by every shortcut.

`max_lag` is out of the way at first, so that the hard check cannot hide what admission and consumption let through.
Then the lead moves under way, and the bound that counts is the one at a group's grant.
"""

from dataclasses import replace
from random import Random

import pytest

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.groups import GroupRecord, GroupState
from streamrl.messages import VersionRef
from tests.unit.hub.factories import (
    end_batch,
    joined,
    log_of,
    make_ledger,
    one_actor,
    publish,
    restart,
    settings,
    train,
)
from tests.unit.hub.simulator import World, derived_bound

CASES = [
    (1, 0, 0, 1), (2, 0, 2, 1), (1, 1, 0, 1), (2, 1, 1, 1), (2, 1, 2, 1), (3, 2, 3, 1), (2, 2, 5, 1),
    (2, 0, 0, 4), (2, 1, 2, 4), (3, 2, 3, 2),
]


class GrantsByTheLearnersVersion(Ledger):
    """Wrong: believes that every actor has the newest weights."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        honest = self.lag.may_grant
        self.lag.may_grant = lambda rank, installed: honest(rank, self.version)


class ForgetsTheStepsOfABatch(Ledger):
    """Wrong: takes each batch for one optimizer step when it grants, but trains it in several."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        rule = self.lag.rule
        self.lag.may_grant = lambda rank, installed: rank // rule.groups_per_batch - installed <= rule.eta * 4


class ConsumesInOrderOfCompletion(Ledger):
    """Wrong: what is finished first is trained first."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.completed: list[GroupRecord] = []
        honest = self.lifecycle.hold
        self.lifecycle.hold = lambda record: (self.completed.append(record), honest(record))
        self.cutter.consumable = lambda: (one for one in self.completed if one.state is GroupState.HELD)


class ForgetsThePromise(Ledger):
    """Wrong: judges a group by the bound of today, whatever it was leased under."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.lag.of = lambda record: self.lag.rule.max_lag


def worst_lag(kind: type[Ledger], case: tuple[int, int, int, int], *, num_walks: int) -> tuple[int, int]:
    """Largest head lag of any trained token, and the bound. One actor is lazy about weights, one about old groups."""
    groups_per_batch, eta, window, steps = case
    chosen = settings(
        groups_per_batch=groups_per_batch, group_size=1, eta=eta, window=window, max_lag=1000, steps_per_batch=steps
    )
    worst, num_trained = 0, 0
    for number in range(num_walks):
        rng = Random(f"{case}/{number}")
        world = World(chosen, kind=kind, with_filter=number % 2 == 1)
        for name in ("lazy", "brisk"):
            world.join(name)
        for _ in range(900):
            name = rng.choice(["lazy", "brisk", "brisk"])
            move = rng.choice(["ask", "finish", "finish", "install", "train"])
            if name == "lazy" and move in ("install", "finish") and rng.random() < 0.9:
                continue
            world.move(name, move, -1 if rng.random() < 0.8 else 0)
            if rng.random() < 0.02:
                world.fault("restart", "lazy", 0)
            if rng.random() < 0.1:
                world.publish_inside()
        worst = max(worst, *world.head_lags, 0)
        num_trained += len(world.head_lags)
    assert num_trained > 20 * num_walks, f"only {num_trained} groups were trained in {num_walks} walks"
    return worst, derived_bound(chosen.lag)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "B{} eta{} W{} S{}".format(*case))
def test_no_trained_token_is_older_than_the_bound(case):
    worst, bound = worst_lag(Ledger, case, num_walks=8)

    assert worst <= bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: "B{} eta{} W{} S{}".format(*case))
def test_no_trained_token_is_older_than_the_bound_on_many_walks(case):
    worst, bound = worst_lag(Ledger, case, num_walks=40)

    assert worst <= bound


@pytest.mark.parametrize(("steps", "expected"), [(1, 2), (3, 8)])
def test_the_bound_is_not_loose(steps, expected):
    worst, bound = worst_lag(Ledger, (2, 1, 2, steps), num_walks=40)

    assert worst == bound == expected


@pytest.mark.parametrize(
    ("wrong", "steps"),
    [(GrantsByTheLearnersVersion, 1), (ConsumesInOrderOfCompletion, 1), (ForgetsTheStepsOfABatch, 2)],
)
def test_a_shortcut_breaks_the_bound(wrong, steps):
    worst, bound = worst_lag(wrong, (2, 1, 2, steps), num_walks=20)

    assert worst > bound, f"{wrong.__name__} kept the bound of {bound}: this test has lost its teeth"


def test_strictly_synchronous_training_has_no_lag_but_the_steps_of_its_own_batch():
    for window, steps in ((0, 1), (1, 1), (4, 1), (0, 4), (4, 2)):
        worst, _ = worst_lag(Ledger, (2, 0, window, steps), num_walks=10)
        assert worst == steps - 1


def forced_lags(kind: type[Ledger], *, force: int, steps: int, window: int = 0) -> set[tuple[int, int]]:
    """(What is forced, what is) of every token: its lag at the last step of its batch, over random walks."""
    chosen = settings(
        groups_per_batch=3, group_size=1, eta=force, force=force, window=window, max_lag=99, steps_per_batch=steps
    )
    found = set()
    for number in range(12):
        rng = Random(f"forced/{number}")
        world = World(chosen, kind=kind, with_filter=number % 2 == 1)
        for name in ("lazy", "brisk"):
            world.join(name)
        while world.ledger.version < 9 * steps:
            name = rng.choice(["lazy", "brisk", "brisk"])
            if name == "brisk" or rng.random() < 0.2:
                world.move(name, rng.choice(["ask", "finish", "finish", "install", "train"]), rng.randrange(9))
            if rng.random() < 0.1:
                world.publish_inside()
            if rng.random() < 0.02:
                world.fault("restart", name, 0)
            world.tick(0.1)
            world.check()
        last = steps - 1
        forced = [min(at // 3, force) * steps + last for at in range(len(world.head_lags))]
        found |= set(zip(forced, world.head_lags, strict=True))
    return found


class CutsBatchesAsTheyCome(Ledger):
    """Wrong: does not wait for the lead to be used up."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.lag.rule = replace(self.lag.rule, force=None)


@pytest.mark.parametrize(("force", "steps", "window"), [(0, 1, 0), (1, 1, 3), (3, 1, 0), (3, 2, 7), (5, 1, 3)])
def test_a_forced_lag_is_that_of_every_token(force, steps, window):
    found = forced_lags(Ledger, force=force, steps=steps, window=window)

    assert found == {(number * steps + steps - 1,) * 2 for number in range(force + 1)}


def test_without_the_wait_the_lag_is_not_the_forced_one():
    assert any(forced != found for forced, found in forced_lags(CutsBatchesAsTheyCome, force=3, steps=1))


def test_a_forced_lag_holds_the_last_batches_back_no_longer_than_there_are_groups_to_come():
    ledger, actor, leases = one_actor(
        groups_per_batch=2, eta=2, force=2, window=0, max_lag=2, num_groups_total=8, slots=9
    )
    for lease in leases[:-1]:
        actor.finish(lease)
    assert len(leases) == 6 and ledger.cut_batch(0) is None
    assert "5 of 6 groups have arrived" in ledger.wait_reason(0.0)
    actor.finish(leases[-1])
    assert ledger.cut_batch(0) and ledger.cut_batch(1) is None  # nothing ahead: version 1 has generated nothing yet
    end_batch(ledger, 1)
    publish(ledger, VersionRef(1, 1))
    actor.install(1)
    for lease in actor.ask():
        actor.finish(lease)

    assert [train(ledger), train(ledger), train(ledger)] == [[2, 3], [4, 5], [6, 7]]


def test_batches_of_another_size_are_trained_to_the_end_of_a_resumed_run_within_the_same_bound():
    for number in range(40):
        rng = Random(f"size/{number}")
        before, after = rng.sample(range(1, 9), 2)
        eta, num, more, from_log = rng.randrange(4), rng.randrange(1, 12), rng.randrange(1, 12), number % 2 == 1

        def sized(groups: int, steps: int, eta: int = eta) -> dict[str, int]:
            return {
                "groups_per_batch": groups, "num_groups_total": groups * steps, "group_size": 1, "eta": eta,
                "window": 0, "max_lag": eta,
            }

        ledger, actor, leases = one_actor(slots=64, **sized(before, 99))
        state = ledger.freeze(0)
        for _ in range(num):
            for lease in leases:
                actor.finish(lease)
            train(ledger)
            actor.install(ledger.version)
            leases = actor.ask() if ledger.version < num else []  # no lease is lost, which others would wait for
        if not from_log:
            state = ledger.freeze(num)
        upto = log_of(ledger)[-1][0]
        ledger = restart(ledger, state, upto=upto, changed=settings(**sized(after, num + more)))
        actor = joined(ledger, "a2", slots=64, ref=ledger.versions.ref)
        for _ in range(more):
            for _ in range(2):  # what is held from larger batches may have become too old by the cut
                for lease in actor.ask():
                    actor.finish(lease)
                if batch := ledger.cut_batch(ledger.version):
                    break
            assert batch, (ledger.wait_reason(0.0), before, after, eta, num, more)
            end_batch(ledger, ledger.version + 1)
            publish(ledger, VersionRef(ledger.versions.learner_epoch, ledger.version))
            actor.install(ledger.version, epoch=ledger.versions.ref.learner_epoch)
        assert ledger.version == num + more
        if before < after:  # else more may have been drawn than is left to train, some of it too old by then
            assert not actor.ask() and ledger.counts["num_groups_stale"] == 0, (before, after, eta, num, more)


def walk_with_a_moving_lead(
    kind: type[Ledger], mode: str, *, window: int, num_walks: int, steps: int = 1
) -> tuple[int, int, int]:
    """Groups thrown away for their age, groups trained beyond today's bound, and how often the lead was moved.

    `World` itself compares every trained group with the bound that was in force at its grant.
    """
    num_stale = num_beyond = num_moves = 0
    chosen = settings(
        groups_per_batch=2, group_size=1, eta=1, window=window, mode=mode, max_lag=99, steps_per_batch=steps
    )
    chosen = replace(chosen, lag=replace(chosen.lag, max_lag=derived_bound(chosen.lag)))
    for number in range(num_walks):
        rng = Random(f"moving/{number}")
        world = World(chosen, kind=kind, publishes_late=number % 2 == 1)
        for name in ("lazy", "brisk"):
            world.join(name)
        for _ in range(900):
            name = rng.choice(["lazy", "brisk", "brisk"])
            if rng.random() < 0.02:
                world.set_bounds(rng.choice([0, 0, 1, 3, 4]))
                num_moves += 1
            elif name == "brisk" or rng.random() < 0.2:
                world.move(name, rng.choice(["ask", "finish", "finish", "install", "train"]), -1)
            if world.batch is None and world.cut():
                last = steps - 1
                num_beyond += sum(one.head_lag + last > world.max_lag for group in world.batch for one in group.members)
            world.check()
        num_stale += int(world.ledger.counters()["num_groups_stale"])
        world.behave(num_batches=2)
    return num_stale, num_beyond, num_moves


@pytest.mark.parametrize(
    ("mode", "window", "steps", "num_walks"),
    [
        (*case, num_walks) for num_walks in (6, 20)
        for case in (("drop", 2, 1), ("reweight", 2, 1), ("wait", 0, 1), ("drop", 2, 3))
    ],
)
def test_moving_the_lead_throws_nothing_away_and_keeps_every_group_inside_the_bound_of_its_grant(
    mode, window, steps, num_walks
):
    num_stale, num_beyond, num_moves = walk_with_a_moving_lead(
        Ledger, mode, window=window, num_walks=num_walks, steps=steps
    )

    assert num_stale == 0
    assert num_beyond > num_walks and num_moves > 10 * num_walks, "no lead was lowered while older groups were out"


def test_judging_by_the_bound_of_today_throws_work_away():
    with pytest.raises(AssertionError, match="admission let something through that the cut had to refuse"):
        walk_with_a_moving_lead(ForgetsThePromise, "drop", window=2, num_walks=20)


def test_raising_the_lead_acts_at_once_and_lowering_it_drains():
    ledger, actor, first = one_actor(groups_per_batch=2, eta=1, window=2, max_lag=2, slots=20)
    ledger.lag.set_bounds(3, 4)
    more = actor.ask()
    ledger.lag.set_bounds(0, 1)

    assert (len(first), len(more), len(actor.ask())) == (4, 4, 0)
    for version in range(4):  # eight groups, four batches; with eta 0 the fourth has lag 3 and is trained all the same
        for lease in (first + more)[2 * version : 2 * version + 2]:
            actor.finish(lease, versions=[(1, 0)])
        train(ledger)
    assert ledger.counters()["num_groups_stale"] == 0
    actor.install(4)
    assert len(actor.ask()) == 2


def test_an_actor_is_not_told_to_give_up_groups_that_were_leased_under_a_wider_bound():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=3, window=0, max_lag=3, slots=9)
    ledger.lag.set_bounds(0, 0)
    for lease in leases:
        assert ledger.lag.min_useful().version == 0
        actor.finish(lease)
        train(ledger)
    assert ledger.lag.min_useful().version == 4  # whatever was leased before the change is trained by now


def test_a_lead_that_contradicts_its_bound_changes_nothing():
    ledger = make_ledger(groups_per_batch=2, eta=1, window=2, max_lag=2)

    with pytest.raises(ValueError, match="max_lag=2 is below 3"):
        ledger.lag.set_bounds(3, 2)
    assert (ledger.lag.rule.eta, ledger.lag.rule.max_lag) == (1, 2)


# --- waiting instead of dropping --------------------------------------------------------------------------------------


def test_under_wait_a_slow_group_is_waited_for_and_trained_at_lag_eta():
    outcomes = {}
    for mode, window in (("wait", 0), ("drop", 4)):
        ledger = make_ledger(groups_per_batch=1, eta=2, window=window, max_lag=2, mode=mode)
        slow, quick = joined(ledger, "a1", slots=1), joined(ledger, "a2", incarnation=12, slots=8)
        (first,) = slow.ask()
        waited = 0
        for version in range(3):
            for lease in quick.ask():
                quick.finish(lease)
            if ledger.cut_batch(version) is None:
                waited += 1
                assert f"group 0 (prompt {first.prompt_index}, attempt 0) is with actor a1" in ledger.wait_reason(0.0)
                break
            end_batch(ledger, version + 1)
            publish(ledger, VersionRef(1, version + 1))
            quick.install(version + 1)
        result = slow.finish(first).kind
        outcomes[mode] = (waited, result, ledger.counters()["num_groups_stale"])
        if mode == "wait":
            assert [train(ledger) for _ in range(3)] == [[0], [1], [2]]  # strictly in dispatch order

    assert outcomes == {"wait": (1, "accepted", 0.0), "drop": (0, "rejected", 1.0)}
