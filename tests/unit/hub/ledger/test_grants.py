"""Who gets a lease, and when not."""


from streamrl.messages import EVAL_BIT, ActorState, ReturnReason, VersionRef
from tests.unit.hub.factories import FakeActor, joined, make_ledger, one_actor, train


def test_an_actor_without_usable_weights_gets_nothing():
    ledger = make_ledger()
    for ref in (None, VersionRef(1, 5), VersionRef(9, 0)):  # none, the future, an unknown epoch
        actor = joined(ledger, "a1", ref=ref)
        assert actor.ask() == []


def test_two_hungry_actors_share_what_there_is():
    ledger = make_ledger(groups_per_batch=4, eta=0)
    first, second = joined(ledger, "a1", slots=8), joined(ledger, "a2", slots=8)
    first.beat(), second.beat()

    assert len(ledger.grant("a1", 0.0)) == 2
    assert ledger.grant_order() == ["a2", "a1"]
    assert len(ledger.grant("a2", 0.0)) == 2


def test_a_revoked_lease_frees_its_slot_only_when_the_actor_says_so():
    ledger, actor, (lease,) = one_actor(groups_per_batch=10, lease_ttl_s=10.0, slots=1)

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


def test_the_run_never_has_more_groups_than_it_will_train():
    ledger = make_ledger(groups_per_batch=2, eta=3, max_lag=4, num_groups_total=4)
    actor = joined(ledger, "a1", slots=20)

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
    ledger, actor, (lease,) = one_actor(groups_per_batch=2, slots=1)

    ledger.drain("a1", 0.0)

    assert actor.finish(lease).kind == "accepted"
    assert actor.ask() == []


def test_evaluation_goes_first_and_only_to_actors_that_have_the_version():
    ledger = make_ledger(groups_per_batch=1, eta=0, window=0, max_lag=0)
    fresh, old = joined(ledger, "fresh"), joined(ledger, "old")
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
    busy, _ = joined(ledger, "busy"), joined(ledger, "idle")
    busy.finish(busy.ask()[0])

    assert ledger.acks_due() == ["busy"]
    while ledger.take_acks("busy") is not None:
        pass
    assert ledger.acks_due() == []
