"""What a hostile or broken actor may send, hold and claim: nothing untrainable, nothing without end."""

import msgspec
import numpy as np
import pytest

from learner.data.packing import pack
from learner.data.trajectories import read_groups
from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.actor import MAX_LEASES
from streamrl.messages import Group, Limits, Member, RejectReason, Sampling, SequenceStart, Turn
from streamrl.messages.codec import pack_ids, pack_logprobs, unpack_ids
from streamrl.messages.validate import pack_sets
from tests.unit.hub.factories import (
    LIMITS,
    FakeActor,
    held_groups,
    joined,
    ledger_arguments,
    log_of,
    make_ledger,
    settings,
)

BUDGET = 40
TTL_S, DEAD_S = 60.0, 5.0
HUB_LIMITS = msgspec.structs.replace(LIMITS, max_sequences=4, max_trajectory_tokens=BUDGET)


def observing(one: Member, num_observed: int) -> Member:
    """One action token, then so many of the environment's."""
    return msgspec.structs.replace(
        one, token_ids=pack_ids([4] * (1 + num_observed)), logprobs=pack_logprobs([-0.5] + [0.0] * num_observed),
        turns=(Turn(0, 1 + num_observed, 1.0),),
    )


def rewritten(one: Member, num_prompt: int) -> Member:
    """Two action tokens, the second after a prompt of its own."""
    return msgspec.structs.replace(
        one, token_ids=pack_ids([4, 4]), logprobs=pack_logprobs([-0.5, -0.5]), mask=((0, 2),),
        versions=(msgspec.structs.replace(one.versions[0], end=2),), turns=(Turn(0, 2, 1.0),),
        sequences=(SequenceStart(1, pack_ids([3] * num_prompt)),),
    )


def with_members(group: Group, change) -> Group:
    return msgspec.structs.replace(group, members=tuple(change(one) for one in group.members))


@pytest.mark.parametrize("change", [observing, rewritten])
def test_the_longest_trajectory_that_is_accepted_can_be_packed_and_one_token_more_is_refused(change):
    ledger = make_ledger(groups_per_batch=1, limits=HUB_LIMITS)
    actor = joined(ledger)
    first, second, *_ = actor.ask()
    # 3 tokens of the prompt, and one action token or two
    room = BUDGET - 4 if change is observing else BUDGET - 5

    too_long = actor.send(with_members(actor.group(first), lambda one: change(one, room + 1)))
    assert (too_long.reason, too_long.strike) == (RejectReason.MALFORMED, True)
    assert "too_many_tokens" in too_long.detail and f"at most {BUDGET}" in too_long.detail
    assert actor.send(with_members(actor.group(second), lambda one: change(one, room))).kind == "accepted"

    (held,) = held_groups(ledger)
    rows = read_groups(held.frames)
    assert [row.num_tokens for row in rows] == [BUDGET, BUDGET] and len(pack(rows, BUDGET)) == 2


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.5), Sampling(top_p=0.9), Sampling(top_k=5)]
)
def test_what_was_sampled_otherwise_than_leased_is_refused(sampling):
    ledger = make_ledger(groups_per_batch=1)
    actor = joined(ledger)
    lease, *_ = actor.ask()

    group = msgspec.structs.replace(actor.group(lease), sampling=sampling)
    if sampling.temperature == 1.0:  # some ids were cut off
        group = msgspec.structs.replace(group, members=tuple(
            msgspec.structs.replace(one, sets=pack_sets([
                np.array([token]) for start, end in one.mask for token in unpack_ids(one.token_ids)[start:end]
            ])) for one in group.members
        ))
    result = actor.send(group)

    assert (result.reason, result.strike) == (RejectReason.MALFORMED, True) and "the lease asked for" in result.detail
    assert held_groups(ledger) == []


def test_an_evaluation_is_sampled_as_its_own_set_says():
    ledger = make_ledger()
    ledger.evals.request(0, version=0, num_prompts=2)
    actor = joined(ledger)
    first, second = [lease for lease in actor.ask(free_eval=2) if lease.purpose]

    assert actor.finish(first).kind == "accepted", "greedy, as leased"
    wrong = actor.send(msgspec.structs.replace(actor.group(second), sampling=Sampling()))
    assert (wrong.reason, wrong.strike) == (RejectReason.MALFORMED, True)


def test_what_was_drawn_for_a_learner_before_this_one_may_have_its_temperature_but_must_have_one():
    old, new = Sampling(temperature=0.7), Sampling()
    ledger = Ledger(settings(), **ledger_arguments(sampling=old))
    actor = joined(ledger)
    first, second, *_ = actor.ask()
    groups = [actor.group(first), msgspec.structs.replace(actor.group(second), sampling=Sampling(temperature=0.0))]
    actor.ledger = Ledger.restore(ledger.freeze(0), settings(), **ledger_arguments(learner_epoch=2, sampling=new))
    actor.join()

    assert [actor.send(group).kind for group in groups] == ["accepted", "rejected"]


def test_a_group_in_a_checkpoint_that_cannot_be_trained_any_more_is_generated_again():
    ledger = make_ledger(groups_per_batch=2, limits=Limits(vocab_size=100))
    actor = joined(ledger)
    long, short, *_ = actor.ask()
    actor.send(with_members(actor.group(long), lambda one: observing(one, BUDGET)))
    actor.finish(short)
    state = ledger.freeze(0)

    log = log_of(ledger)
    resumed = Ledger.restore(
        state, settings(limits=HUB_LIMITS), records=lambda first: log[first - 1 :], **ledger_arguments(learner_epoch=2)
    )

    (why,) = resumed.refused_on_resume
    assert f"group {long.group_id} member 0" in why and "learner.max_tokens_per_device" in why
    assert [group.group_id for group in held_groups(resumed)] == [short.group_id]
    assert resumed.counters()["num_groups_refused_on_resume"] == 1
    assert resumed.counters()["num_groups_ready"] >= 1
    resumed.check()


# --- leases ----------------------------------------------------------------------------------------------------------


def hold(actor: FakeActor, ledger: Ledger, until: float, *, works: bool, now: float = 0.0) -> list:
    """A beat a second that lists every lease; what the ledger does meanwhile."""
    effects = []
    while now < until:
        now += 1.0
        actor.beat(now, held=list(actor.leases), works=works)
        effects += ledger.tick(now)
    return effects


def test_an_actor_that_holds_leases_without_progress_loses_them_and_then_gets_one_at_a_time():
    ledger = make_ledger(groups_per_batch=8, lease_ttl_s=TTL_S, dead_after_s=DEAD_S)
    actor = joined(ledger, slots=8)
    held = actor.ask()
    assert len(held) == 8

    (effect,) = hold(actor, ledger, TTL_S + 1, works=False)
    assert set(effect.leases) == {lease.ref for lease in held}, "it said all the time that it holds them"
    actor.revoke(effect.leases)

    def asks(now: float) -> int:
        return len(actor.ask(now))

    (again,) = actor.ask(TTL_S + 2)
    assert asks(TTL_S + 3) == 0
    actor.finish(again, TTL_S + 4)
    assert asks(TTL_S + 5) == 2, "it has delivered: twice as many"


def test_an_actor_that_makes_progress_keeps_its_leases():
    ledger = make_ledger(groups_per_batch=8, lease_ttl_s=TTL_S, dead_after_s=DEAD_S)
    actor = joined(ledger, slots=8)
    actor.ask()

    assert hold(actor, ledger, 5 * TTL_S, works=True) == []


def test_an_engine_that_counts_a_turn_at_its_end_has_the_time_of_the_slowest_turn():
    ledger = make_ledger(groups_per_batch=8, lease_ttl_s=TTL_S, dead_after_s=DEAD_S, slowest_turn_s=3 * TTL_S)
    actor = joined(ledger, slots=8)
    actor.ask()

    assert hold(actor, ledger, 3 * TTL_S - 1, works=False) == []
    assert len(hold(actor, ledger, 3 * TTL_S + 1, works=False, now=3 * TTL_S - 1)) == 1


def test_progress_that_never_ends_in_a_group_does_not_keep_a_lease_without_end():
    ledger = make_ledger(groups_per_batch=2, lease_ttl_s=TTL_S, dead_after_s=DEAD_S, lease_max_s=3 * TTL_S)
    liar, honest = joined(ledger), FakeActor(ledger, "a2", incarnation=12)
    taken = liar.ask()
    hold(liar, ledger, 3 * TTL_S + 1, works=True)
    honest.join(3 * TTL_S + 1)

    assert {lease.group_id for lease in honest.ask(3 * TTL_S + 1)} >= {lease.group_id for lease in taken}


def test_slots_that_no_hello_could_list_are_not_believed():
    ledger = make_ledger(groups_per_batch=500, eta=9, max_lag=10, window=500)
    actor = joined(ledger, slots=65_535)
    actor.beat(0.0, free=65_535, max_leases=65_535, free_eval=65_535)
    num = 0
    while leases := ledger.grant("a1", 0.0):
        num += len(leases)

    assert num == MAX_LEASES
