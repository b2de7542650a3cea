"""What becomes of an incoming group: one test a rule."""

import msgspec
import pytest

from streamrl.messages import Outcome, RejectReason, ReturnReason
from tests.unit.hub.factories import FakeActor, held_groups, joined, make_ledger, one_actor, train


def test_the_first_valid_completion_wins_even_if_it_is_the_late_one():
    ledger, first, (lease, *_) = one_actor(groups_per_batch=1, eta=0)
    late = first.group(lease)
    ledger.evict("a1", 1.0)
    second = joined(ledger, "a2", now=1.0)
    (again,) = second.ask(1.0)

    first.join(2.0)
    assert first.send(late, 2.0).kind == "accepted"

    assert [(effect.kind, effect.actor_id, effect.leases) for effect in ledger.tick(2.0)] == [
        ("revoke", "a2", (again.ref,))
    ]
    assert second.finish(again, 2.0).reason is RejectReason.DUPLICATE
    assert train(ledger) == [lease.group_id]


def test_a_repeated_message_repeats_its_answer_and_changes_nothing():
    ledger, actor, leases = one_actor()
    good, bad = actor.group(leases[0]), actor.group(leases[1], versions=[(1, 99)])
    assert (actor.send(good).kind, actor.send(bad).kind) == ("accepted", "rejected")
    actor.ledger.take_acks("a1")
    before = {name: count for name, count in ledger.counters().items() if name != "num_repeats"}

    assert (actor.send(good).kind, actor.send(bad).kind) == ("repeat", "repeat")

    ack = ledger.take_acks("a1")
    assert ack.settled_upto == 2 and [(one.seq, one.reason) for one in ack.rejected] == [(2, RejectReason.VERSION)]
    assert {name: count for name, count in ledger.counters().items() if name != "num_repeats"} == before


def test_a_number_beyond_the_window_is_malformed_and_a_strike():
    ledger, actor, leases = one_actor(dedupe_window=8)
    actor.next_seq = 9

    result = actor.finish(leases[0])

    assert (result.reason, result.strike) == (RejectReason.MALFORMED, True)
    assert ledger.take_acks("a1").settled_upto == 0  # it was not settled, so an honest re-send is still possible


def test_a_group_that_was_never_leased_to_this_actor_is_a_strike():
    ledger, first, leases = one_actor()
    second = joined(ledger, "a2")

    stolen = second.finish(leases[0])
    invented = second.finish(msgspec.structs.replace(leases[0], group_id=999))

    assert (stolen.reason, stolen.strike) == (RejectReason.NO_LEASE, True)
    assert (invented.reason, invented.strike) == (RejectReason.NO_LEASE, True)


def test_an_impossible_group_names_its_rule_and_its_lease_goes_to_another_attempt():
    ledger, actor, (lease, *_) = one_actor()
    group = actor.group(lease)
    bad = msgspec.structs.replace(group.members[0], reward=float("nan"))

    result = actor.send(msgspec.structs.replace(group, members=(bad, group.members[1])))

    assert (result.reason, result.strike) == (RejectReason.MALFORMED, True)
    assert result.detail.startswith("reward_finite:")
    assert ledger.counters()["num_malformed_reward_finite"] == 1
    assert (lease.group_id, 1) in [one.ref for one in actor.ask()]  # else the rejected lease would stay out forever


@pytest.mark.parametrize("versions", [[(1, 7)], [(2, 0)], [(1, 0), (9, 0)]], ids=["future", "epoch", "second span"])
def test_tokens_of_versions_outside_this_history_are_refused(versions):
    ledger, actor, (lease, *_) = one_actor()

    result = actor.finish(lease, versions=versions)

    assert (result.reason, result.strike) == (RejectReason.VERSION, False)


def test_missing_members_are_leased_again_alone():
    ledger, actor, (lease, *_) = one_actor(group_size=3)

    actor.finish(lease, aborted=[1])
    again = next(one for one in actor.ask() if one.group_id == lease.group_id)

    assert (again.attempt, again.members, again.seeds) == (1, (1,), lease.seeds[1:2])
    assert actor.finish(again).kind == "accepted"
    (held,) = held_groups(ledger)
    assert [one.index for one in held.members] == [0, 1, 2] and len(held.frames) == 2


def test_reissue_whole_throws_the_finished_members_away():
    ledger, actor, (lease, *_) = one_actor(group_policy="reissue_whole")

    actor.finish(lease, aborted=[1])
    again = next(one for one in actor.ask() if one.group_id == lease.group_id)

    assert again.members == (0, 1)
    actor.finish(again)
    assert len(held_groups(ledger)[0].frames) == 1


def test_accept_partial_holds_a_group_that_has_enough_members():
    ledger, actor, (lease, other, *_) = one_actor(group_size=3, group_policy="accept_partial", min_members=2)

    actor.finish(lease, aborted=[1])
    actor.finish(other, aborted=[0, 1])

    (held,) = held_groups(ledger)
    assert (held.group_id, [one.index for one in held.members]) == (lease.group_id, [0, 2])


def test_accept_partial_waits_for_its_deadline_if_it_has_one():
    ledger, actor, (lease, *_) = one_actor(
        group_size=3, group_policy="accept_partial", min_members=2, group_deadline_s=10.0
    )
    actor.finish(lease, 1.0, members=[0, 2], outcome=Outcome.PARTIAL)

    actor.beat(9.0), ledger.tick(9.0)
    assert held_groups(ledger) == []
    actor.beat(10.0)
    effects = ledger.tick(10.0)

    assert [group.group_id for group in held_groups(ledger)] == [lease.group_id]
    assert lease.ref in [ref for effect in effects for ref in effect.leases]


def test_a_group_deadline_reissues_what_is_overdue():
    ledger, actor, (lease, *_) = one_actor(group_deadline_s=5.0)

    actor.beat(5.0)
    effects = ledger.tick(5.0)

    assert effects[0].kind == "revoke" and lease.ref in effects[0].leases


def test_late_partial_data_call_off_the_attempt_that_would_repeat_them():
    ledger, first, (lease, *_) = one_actor(group_size=3)
    late = first.group(lease, members=[0], outcome=Outcome.PARTIAL)
    ledger.evict("a1", 1.0)
    second = joined(ledger, "a2", slots=1, now=1.0)
    (whole,) = second.ask(1.0)

    first.join(2.0)
    first.send(late, 2.0)

    assert [effect.leases for effect in ledger.tick(2.0)] == [(whole.ref,)]
    second.revoke([whole.ref])
    assert second.ask(2.0)[0].members == (1, 2)


def test_a_group_that_fails_too_often_is_dropped_and_replaced():
    ledger, actor, (lease, *_) = one_actor(max_attempts=3)

    for _ in range(3):
        actor.hand_back(lease, ReturnReason.ENV_ERROR)
        again = [one for one in actor.ask() if one.group_id == lease.group_id]
        lease = again[0] if again else lease

    assert ledger.counters()["num_dropped_attempts"] == 1
    assert max(actor.leases)[0] == 4  # one more prompt was drawn in its place


@pytest.mark.parametrize("reason", [ReturnReason.DRAIN, ReturnReason.NO_SLOT])
def test_handing_back_for_an_innocent_reason_is_no_failure(reason):
    ledger, actor, (lease, *_) = one_actor(max_attempts=1)

    actor.hand_back(lease, reason)

    assert (lease.group_id, 1) in [one.ref for one in actor.ask()]
    assert ledger.counters()["num_groups_dropped"] == 0


@pytest.mark.parametrize("reason", [ReturnReason.TOO_LONG, ReturnReason.PROMPT_INVALID, ReturnReason.POISON])
def test_a_prompt_that_no_actor_can_do_is_dropped_at_once(reason):
    ledger, actor, (lease, *_) = one_actor()

    actor.hand_back(lease, reason)

    assert ledger.counters()[f"num_dropped_{reason.name.lower()}"] == 1
    ack = ledger.take_acks("a1")
    assert (ack.settled_upto, ack.durable_upto) == (1, 1)  # nothing to keep for a checkpoint


def test_a_filtered_group_leaves_capacity_at_once():
    ledger = make_ledger(
        groups_per_batch=1, eta=0, window=0, max_lag=0, keep_group=lambda group: "dull" if group.group_id == 0 else None
    )
    actor = joined(ledger)

    actor.finish(actor.ask()[0])

    assert ledger.counters()["num_groups_filtered"] == ledger.counters()["num_dropped_dull"] == 1
    assert [lease.group_id for lease in actor.ask()] == [1]


@pytest.mark.parametrize(
    "changes, exit_code",
    [
        (dict(incarnation=0), 4), (dict(outbox=((5, 4),), next_seq=9), 4), (dict(outbox=((1, 1),), next_seq=2000), 4),
    ],
    ids=["incarnation", "outbox order", "outbox window"],
)
def test_an_impossible_hello_is_stopped_with_a_reason(changes, exit_code):
    ledger = make_ledger()

    result = FakeActor(ledger, "a1").join(**changes)

    assert result.stop.exit_code == exit_code and result.stop.detail and not result.stop.rejoin
    assert ledger.counters()["num_actors"] == 0


def test_a_reconnecting_actor_keeps_the_leases_that_no_other_actor_has():
    ledger, actor, leases = one_actor()

    ledger.evict("a1", 1.0)
    result = actor.join(2.0)

    assert result.held == tuple((lease.ref, True) for lease in leases)
    assert actor.finish(leases[0], 2.0).kind == "accepted"


def test_a_lease_that_was_lost_on_its_way_returns_to_the_pool_with_the_next_hello():
    ledger, actor, leases = one_actor()
    actor.leases.clear()  # the LEASE message never arrived

    actor.join(1.0)

    assert [lease.ref for lease in actor.ask(1.0)] == [(lease.group_id, 1) for lease in leases]


def test_a_lease_whose_group_is_still_in_the_outbox_waits_for_the_resend():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1)
    lost = actor.group(leases[0])
    other = FakeActor(ledger, "a2")

    actor.join(1.0)
    other.join(1.0)

    assert other.ask(1.0) == []  # group 0 is on its way, so no actor makes it twice
    assert actor.send(lost, 1.0).kind == "accepted"


def test_a_lease_that_is_neither_held_nor_sent_again_is_released_once_the_resends_are_in():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=1)
    lost = actor.group(leases[0])
    actor.leases.clear()  # and the other lease it has forgotten
    actor.join(1.0)
    assert ledger.counters()["num_leases_open"] == 2

    actor.send(lost, 1.0)

    assert ledger.counters()["num_leases_open"] == 0
    assert [lease.ref for lease in actor.ask(1.0)] == [(leases[1].group_id, 1)]


def test_data_without_a_link_ask_for_a_hello():
    ledger, actor, (lease, *_) = one_actor()
    ledger.evict("a1", 1.0)

    assert actor.finish(lease, 1.0).kind == "no_link"


def test_a_group_trained_and_forgotten_is_a_duplicate_not_a_strike():
    ledger, actor, leases = one_actor(groups_per_batch=1, eta=0)
    again = actor.group(leases[0])
    actor.send(again)
    train(ledger)
    ledger.freeze(1), ledger.saved(1)

    repeated = msgspec.structs.replace(again, seq=actor.next_seq)

    assert actor.send(repeated).reason is RejectReason.DUPLICATE


def test_an_evaluation_is_scored_once_and_its_delivery_is_durable_at_once():
    ledger, actor, _ = one_actor()
    ledger.evals.request(3, version=0, num_prompts=3, keep=[0, 2, 9])
    evals = [lease for lease in actor.ask(free_eval=4) if lease.purpose == 1]

    assert actor.finish(evals[0], rewards=[1.0]).kind == "accepted"
    again = actor.group(evals[0], rewards=[0.0])
    assert actor.send(again).reason is RejectReason.DUPLICATE
    ledger.evict("a1", 1.0)
    other = joined(ledger, "a2", now=1.0)
    for lease in other.ask(1.0, free_eval=4):
        if lease.purpose == 1:
            assert lease.attempt == 1
            other.finish(lease, 1.0, rewards=[0.25])

    run = ledger.evals.get(3)
    result = run.result()
    assert run.done and result.num_prompts == 3
    assert (result.score, result.reward, result.mean_tokens) == (0.5, 0.5, 1.0)
    assert {(one.origin.prompt_index, one.origin.actor_id) for one in result.kept} == {(0, "a1"), (2, "a2")}
    assert ledger.take_acks("a2").durable_upto == 2
    assert ledger.evals.get(99) is None


def test_each_prompt_of_an_evaluation_may_be_answered_several_times():
    ledger, actor, _ = one_actor()
    ledger.evals.request(3, version=0, num_prompts=2, keep=[1], num_responses=2)
    leases = [lease for lease in actor.ask(free_eval=4) if lease.purpose == 1]

    assert [(lease.prompt_index, lease.pass_index) for lease in leases] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({lease.seeds for lease in leases}) == 4
    for lease, reward in zip(leases, (1.0, 0.0, 0.5, 0.25), strict=True):
        actor.finish(lease, rewards=[reward])

    result = ledger.evals.get(3).result()
    assert result.prompt_scores == ((1.0, 0.0), (0.5, 0.25))
    assert (result.num_prompts, result.score, len(result.kept)) == (2, 0.4375, 1)


def test_an_evaluation_item_that_keeps_failing_does_not_hold_the_result_up():
    ledger, actor, _ = one_actor(max_attempts=2)
    ledger.evals.request(3, version=0, num_prompts=1)

    for _ in range(2):
        (lease,) = [one for one in actor.ask(free_eval=4) if one.purpose == 1]
        actor.finish(lease, aborted=[0])

    run = ledger.evals.get(3)
    assert (run.done, run.result().num_prompts) == (True, 0)
