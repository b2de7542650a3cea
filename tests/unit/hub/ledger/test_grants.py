"""Who gets a lease, and when not."""

from __future__ import annotations

import pytest

from streamrl.messages import EVAL_BIT, ActorState, ReturnReason, VersionRef
from tests.unit.hub.factories import FakeActor, make_ledger, settings, train


def test_a_trained_batch_frees_exactly_one_batch_of_capacity():
    ledger = make_ledger(groups_per_batch=2, eta=1)
    actor = FakeActor(ledger, "a1", slots=10)
    actor.join()
    for lease in actor.ask():
        actor.finish(lease)

    train(ledger)
    actor.install(1)

    assert [lease.group_id for lease in actor.ask()] == [4, 5]


def test_an_actor_without_usable_weights_gets_nothing():
    ledger = make_ledger()
    for ref in (None, VersionRef(1, 5), VersionRef(9, 0)):  # none, the future, an unknown epoch
        actor = FakeActor(ledger, "a1", ref=ref)
        actor.join()
        assert actor.ask() == []


def test_two_hungry_actors_share_what_there_is():
    ledger = make_ledger(groups_per_batch=4, eta=0)
    first, second = FakeActor(ledger, "a1", slots=8), FakeActor(ledger, "a2", slots=8)
    first.join(), second.join()
    first.beat(), second.beat()

    assert len(ledger.grant("a1", 0.0)) == 2
    assert ledger.grant_order() == ["a2", "a1"]
    assert len(ledger.grant("a2", 0.0)) == 2


def test_a_finished_lease_frees_its_slot_without_a_heartbeat():
    ledger = make_ledger(groups_per_batch=10)
    actor = FakeActor(ledger, "a1", slots=1)
    actor.join()

    actor.finish(actor.ask()[0])

    assert len(ledger.grant("a1", 0.0)) == 1


def test_a_revoked_lease_frees_its_slot_only_when_the_actor_says_so():
    ledger = make_ledger(groups_per_batch=10, lease_ttl_s=10.0)
    actor = FakeActor(ledger, "a1", slots=1)
    actor.join()
    (lease,) = actor.ask()

    actor.beat(9.0, stuck=[lease.ref])
    effects = ledger.tick(10.0)

    assert [(one.kind, one.leases) for one in effects] == [("revoke", (lease.ref,))]
    assert ledger.grant("a1", 10.0) == []
    actor.revoke(effects[0].leases)
    assert [one.ref for one in actor.ask(10.0)] == [(lease.group_id, 1)]


def test_seeds_depend_on_run_group_and_member_but_not_on_the_attempt():
    ledger = make_ledger(groups_per_batch=2, group_size=3)
    first, second = FakeActor(ledger, "a1", slots=2), FakeActor(ledger, "a2", slots=1)
    first.join()
    one, other = first.ask()
    ledger.evict("a1", 1.0)
    second.join(1.0)
    (again,) = second.ask(1.0)

    assert (again.group_id, again.attempt, again.seeds) == (one.group_id, one.attempt + 1, one.seeds)
    assert (again.prompt_index, again.pass_index, again.prompt) == (one.prompt_index, one.pass_index, one.prompt)
    assert len({*one.seeds, *other.seeds}) == 6


def test_a_reissued_group_goes_out_before_new_ones():
    ledger = make_ledger(groups_per_batch=3)
    first, second = FakeActor(ledger, "a1", slots=2), FakeActor(ledger, "a2", slots=4)
    first.join()
    first.ask()
    ledger.evict("a1", 1.0)
    second.join(1.0)

    assert [lease.ref for lease in second.ask(1.0)] == [(0, 1), (1, 1), (2, 0), (3, 0)]
    assert ledger.counters()["num_leases_reissued"] == 2


def test_the_run_never_has_more_groups_than_it_will_train():
    ledger = make_ledger(groups_per_batch=2, eta=3, max_lag=4, num_groups_total=4)
    actor = FakeActor(ledger, "a1", slots=20)
    actor.join()

    leases = actor.ask()
    actor.hand_back(leases[0], ReturnReason.PROMPT_INVALID)
    replacement = actor.ask()

    assert [lease.group_id for lease in leases] == [0, 1, 2, 3]
    assert [lease.group_id for lease in replacement] == [4]  # a dropped group is replaced, so the end is exact
    for lease in leases[1:] + replacement:
        actor.finish(lease)
    train(ledger), train(ledger)
    actor.install(2)
    assert actor.ask() == []
    assert "the run is over" in ledger.wait_reason(0.0)


def test_a_draining_actor_gets_no_more_leases_and_keeps_those_it_has():
    ledger = make_ledger(groups_per_batch=2)
    actor = FakeActor(ledger, "a1", slots=1)
    actor.join()
    (lease,) = actor.ask()

    ledger.drain("a1", 0.0)

    assert actor.finish(lease).kind == "accepted"
    assert actor.ask() == []


def test_evaluation_goes_first_and_only_to_actors_that_have_the_version():
    ledger = make_ledger(groups_per_batch=1, eta=0, window=0, max_lag=0)
    fresh, old = FakeActor(ledger, "fresh"), FakeActor(ledger, "old")
    fresh.join(), old.join()
    fresh.finish(fresh.ask()[0])
    train(ledger)
    fresh.install(1)

    ledger.evals.request(7, version=1, num_prompts=2)

    assert old.ask(free_eval=4) == []
    leases = fresh.ask(free_eval=4)
    assert [lease.purpose for lease in leases] == [1, 1, 0]
    assert [lease.group_id for lease in leases[:2]] == [EVAL_BIT | 7 << 32, EVAL_BIT | 7 << 32 | 1]
    assert leases[0].sampling.temperature == 0.0 and leases[0].min_version == VersionRef(1, 1)
    assert leases[1].prompt == b'{"test": 1}'


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(eta=2, max_lag=1), "max_lag=1 is below 2"),
        (dict(groups_per_batch=0), "groups_per_batch=0"),
        (dict(window=-1), "window=-1"),
    ],
)
def test_contradictory_settings_are_refused_with_the_number_and_the_reason(changes, words):
    with pytest.raises(ValueError, match=words):
        settings(**changes)


def test_a_beat_of_an_actor_without_a_link_is_not_taken():
    ledger = make_ledger()
    actor = FakeActor(ledger, "a1")

    assert actor.beat() is False
    assert ActorState.RUNNING == 2 and ledger.counters()["num_actors"] == 0


def test_no_more_actors_are_asked_than_there_are_groups_and_those_that_hold_least_come_first():
    ledger = make_ledger(groups_per_batch=3, eta=0)
    actors = [FakeActor(ledger, f"a{number}", slots=4) for number in range(6)]
    for actor in actors:
        actor.join()
        actor.beat()
    assert ledger.grant_order() == ["a0", "a1", "a2"]  # three groups may be drawn

    ledger.grant("a0", 0.0)
    assert ledger.grant_order() == ["a1", "a2"]
    ledger.grant("a1", 0.0), ledger.grant("a2", 0.0)
    assert ledger.grant_order() == []  # and nothing is left

    ledger.evict("a1", 0.0)
    assert ledger.grant_order() == ["a3"]
    ledger.check()


def test_only_actors_with_something_to_be_told_are_asked_for_acks():
    ledger = make_ledger()
    busy, idle = FakeActor(ledger, "busy"), FakeActor(ledger, "idle")
    busy.join(), idle.join()
    busy.finish(busy.ask()[0])

    assert ledger.acks_due() == ["busy"]
    while ledger.take_acks("busy") is not None:
        pass
    assert ledger.acks_due() == []
