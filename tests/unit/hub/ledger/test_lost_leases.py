"""A lease that never reached its actor comes back; one that did is left alone."""

import pytest

from learner.hub.ledger.actors import LOST_AFTER
from learner.hub.ledger.ledger import Ledger
from streamrl.messages import RejectReason
from tests.unit.hub.factories import FakeActor, joined, make_ledger

DEAD_S, TTL_S = 2.0, 60.0
LATE_S = LOST_AFTER * DEAD_S


@pytest.fixture
def ledger() -> Ledger:
    return make_ledger(dead_after_s=DEAD_S, lease_ttl_s=TTL_S)


def beats(actor: FakeActor, ledger: Ledger, until: float, **what) -> list:
    """A beat a second, and what the ledger does meanwhile."""
    effects, now = [], 1.0
    while now <= until:
        actor.beat(now, **what)
        effects += ledger.tick(now)
        now += 1.0
    return effects


def test_a_lease_that_no_heartbeat_names_goes_back_to_the_pool_and_costs_no_attempt(ledger):
    actor = joined(ledger)
    lost, *arrived = actor.ask()
    held = [lease.ref for lease in arrived]

    assert beats(actor, ledger, LATE_S - 1, held=held) == []
    (effect,) = beats(actor, ledger, LATE_S, held=held)

    assert (effect.kind, effect.leases) == ("revoke", (lost.ref,)), "should it arrive yet, it is cancelled"
    assert ledger.counters()["num_leases_lost"] == 1
    other = joined(ledger, "a2")
    (again,) = [lease for lease in other.ask(LATE_S) if lease.group_id == lost.group_id]
    assert again.attempt == lost.attempt + 1 and again.seeds == lost.seeds


def test_a_lease_that_was_named_once_has_the_time_that_every_lease_has(ledger):
    actor = joined(ledger)
    leases = actor.ask()
    actor.beat(1.0, held=[lease.ref for lease in leases])

    assert beats(actor, ledger, TTL_S, held=()) == [], "it is done there, its group is on its way"
    (effect,) = beats(actor, ledger, TTL_S + 1, held=())
    assert set(effect.leases) == {lease.ref for lease in leases} and ledger.counters()["num_leases_lost"] == 0


def test_a_group_of_a_lease_that_was_given_up_is_still_welcome_while_no_other_actor_has_it(ledger):
    actor = joined(ledger)
    lost, *_ = actor.ask()
    beats(actor, ledger, LATE_S, held=())

    assert actor.finish(lost, LATE_S).kind == "accepted"
    assert ledger.counters()["num_rejected_" + RejectReason.NO_LEASE.name.lower()] == 0


def test_an_actor_that_does_not_say_what_it_holds_is_believed(ledger):
    actor = joined(ledger)
    assert actor.ask()
    assert beats(actor, ledger, 2 * TTL_S, held=None) == []
