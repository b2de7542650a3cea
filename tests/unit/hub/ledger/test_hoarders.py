"""An actor that takes leases and never delivers, but shows progress: others go on, and honest newcomers do as well."""

import pytest

from learner.hub.ledger.actors import PROBATION, PROBATION_S
from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.actor import MAX_LEASES
from streamrl.messages import RejectReason
from tests.unit.hub.factories import FakeActor, end_batch, joined, make_ledger, publish, restart, train

GROUP_S = 2.0


def a_ledger(**changes: object) -> Ledger:
    times = {"lease_ttl_s": 600.0, "dead_after_s": 5.0, "lease_max_s": 900.0}
    return make_ledger(groups_per_batch=4, eta=1, window=4, **times, **changes)


def steps_in(
    ledger: Ledger, honest: list[FakeActor], hoarders: list[FakeActor], seconds: float, now: float = 0.0
) -> list[float]:
    """When steps are trained meanwhile: honest actors deliver GROUP_S after each lease, hoarders count tokens."""
    due: list[tuple[float, FakeActor, object]] = []
    steps, until = [], now + seconds
    while now < until:
        now += 0.5
        for effect in ledger.tick(now):
            for actor in (*honest, *hoarders):
                if actor.actor_id == effect.actor_id:
                    actor.revoke(effect.leases)
        for at, actor, lease in [one for one in due if one[0] <= now]:
            due.remove((at, actor, lease))
            if lease.ref in actor.leases:
                actor.finish(lease, now)
        everyone = {actor.actor_id: actor for actor in (*hoarders, *honest)}
        for actor in everyone.values():
            actor.beat(now, held=list(actor.leases))
        while got := [(name, lease) for name in ledger.grant_order() if name in everyone
                      for lease in ledger.grant(name, now)]:
            for name, lease in got:
                everyone[name].leases[lease.ref] = lease
                due += [(now + GROUP_S, everyone[name], lease)] if everyone[name] in honest else []
        while ledger.cut_batch(ledger.version) is not None:
            end_batch(ledger, ledger.version + 1)
            steps.append(now)
            publish(ledger, ledger.versions.ref)
            for actor in (*honest, *hoarders):
                actor.install(ledger.version, now)
        ledger.check()
    return steps


@pytest.mark.parametrize("slots", [1, 4, 1000])
@pytest.mark.parametrize("num_hoarders", [1, 3])
@pytest.mark.parametrize("first", [True, False], ids=["alone at first", "together"])
def test_hoarders_hold_a_run_up_for_their_probation_only(slots: int, num_hoarders: int, first: bool):
    ledger = a_ledger()
    hoarders = [joined(ledger, f"hoarder-{number}", slots=slots) for number in range(num_hoarders)]
    for actor in hoarders if first else ():
        actor.ask()
    honest = [joined(ledger, "honest-0"), joined(ledger, "honest-1")]

    steps = steps_in(ledger, honest, hoarders, PROBATION_S + 100.0)

    assert max(after - before for before, after in zip([0.0, *steps], steps, strict=False)) < PROBATION_S + 5 * GROUP_S
    assert sum(at > PROBATION_S + 5 * GROUP_S for at in steps) >= 40, "and then as if the hoarders were not there"
    assert all(ledger.num_leases(one.actor_id) == 0 for one in hoarders)
    assert "others waited for it" in ledger.actor_status("hoarder-0", 0.0)


def test_a_new_name_beside_actors_that_have_delivered_gets_one_lease_and_then_twice_as_many():
    ledger = a_ledger()
    old, new = joined(ledger, "old"), joined(ledger, "new", slots=8)
    for lease in old.ask():
        old.finish(lease, 1.0)
    late = joined(ledger, "late", slots=8, now=1.0)

    assert len(new.ask(1.0)) > 1, "it was there before anyone had delivered"
    train(ledger)
    for actor in (old, late):
        actor.install(1, 2.0)
    (first,) = late.ask(2.0)
    late.finish(first, 3.0)
    assert len(late.ask(3.0)) == 2


def test_one_actor_alone_gets_a_lease_for_every_slot():
    ledger = make_ledger(groups_per_batch=500, eta=9, max_lag=10, window=500)
    actor = joined(ledger, "alone", slots=700)
    assert len(actor.ask()) == 700
    assert MAX_LEASES > 700


def test_a_restarted_process_and_one_that_outlived_the_learner_are_no_new_names():
    ledger = a_ledger()
    actor, other = joined(ledger), joined(ledger, "a2")
    for one in (actor, other):
        for lease in one.ask():
            one.finish(lease)
    again = joined(ledger, "a1", incarnation=99, slots=8, now=1.0)
    train(ledger)
    again.install(1, 1.0)
    assert len(again.ask(1.0)) > 1

    successor = restart(ledger, ledger.freeze(1))
    again.ledger = other.ledger = successor
    other.join(2.0), again.join(2.0)
    assert successor.actors.get("a1").proven and successor.actors.get("a2").proven


def test_a_newcomer_that_is_slow_but_honest_gets_leases_again_with_its_late_group():
    ledger = a_ledger()
    fast, slow = joined(ledger, "fast", slots=8), joined(ledger, "slow", slots=2)
    taken = slow.ask()
    steps_in(ledger, [fast], [slow], PROBATION_S + 5.0)
    now = PROBATION_S + 5.0
    slow.beat(now, held=list(slow.leases))
    assert ledger.num_leases("slow") == 0 and ledger.version > 0, "the others went on with its groups"

    assert slow.ask(now) == []
    first = slow.finish(taken[0], now, versions=[(1, ledger.version)])
    assert first.kind == "accepted" or first.reason is RejectReason.DUPLICATE, first
    slow.install(ledger.version, now)
    assert ledger.actors.get("slow").proven and ledger.actors.get("slow").train.room > 0


def test_who_was_there_first_gives_of_its_leases_before_anyone_has_delivered():
    ledger = a_ledger()
    first = joined(ledger, "first", slots=8)
    held = first.ask()
    second = joined(ledger, "second", slots=8, now=1.0)
    assert len(held) == 8 and second.ask(1.0) == []

    (effect,) = ledger.tick(1.0)

    assert effect.leases == tuple(lease.ref for lease in held[4:]), "the other one had nothing"
    first.revoke(effect.leases)
    assert len(second.ask(1.0)) == 4 and ledger.tick(1.0) == []


def test_an_actor_that_has_delivered_keeps_what_it_has():
    ledger = a_ledger()
    old, new = joined(ledger, "old", slots=8), joined(ledger, "new", slots=8)
    old.finish(old.ask()[0])
    for now in (1.0, 100.0, 500.0):
        old.beat(now, held=list(old.leases)), new.beat(now)
        assert ledger.tick(now) == [] and ledger.num_leases("old") == 7


def test_probation_is_longer_where_groups_take_longer():
    ledger = a_ledger()
    fast, slow = joined(ledger, "fast", slots=8), joined(ledger, "slow", slots=2)
    slow.ask()
    leases = fast.ask()
    slowest = 2 * PROBATION_S
    for lease in leases:
        fast.finish(lease, slowest)

    def hold(now: float) -> int:
        slow.beat(now, held=list(slow.leases)), fast.ask(now)
        ledger.tick(now)
        return ledger.num_leases("slow")

    now = slowest
    while now < PROBATION * slowest - 2.0:
        now += 2.0
        assert hold(now) > 0
    hold(PROBATION * slowest + 1.0)
    assert ledger.num_leases("slow") == 0


def test_nothing_ends_while_there_is_work_for_everyone():
    ledger = make_ledger(groups_per_batch=50, eta=3, max_lag=4, window=50, dead_after_s=5.0, lease_ttl_s=600.0)
    fast, slow = joined(ledger, "fast", slots=2), joined(ledger, "slow", slots=2)
    slow.ask()
    now = 0.0
    for lease in fast.ask():
        fast.finish(lease, 1.0)
    while now < 4 * PROBATION_S:
        now += 2.0
        slow.beat(now, held=list(slow.leases)), fast.beat(now)
        ledger.tick(now)

    assert ledger.num_leases("slow") == 2
