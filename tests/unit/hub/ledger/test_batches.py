"""Order of consumption, age at the cut, and the plan over ranks."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.hub.ledger.plan import plan_batch
from learner.hub.ledger.tables.filters import accuracy_range, first_of, zero_std
from learner.hub.ledger.tables.groups import HeldGroup, HeldMember
from streamrl.messages import VersionRef
from tests.unit.hub.factories import STEADY, cut, end_batch, joined, make_ledger, publish, train


def held(group_id: int, *, tokens: int = 10, rewards=(0.0, 1.0), scores=None) -> HeldGroup:
    members = tuple(
        HeldMember(i, tokens, tokens // 2, reward, (scores or [{}] * len(rewards))[i], 1)
        for i, reward in enumerate(rewards)
    )
    return HeldGroup(group_id, 3, members, (b"frame",))


# --- the cut --------------------------------------------------------------------------------------------------------


def test_the_window_counts_over_batches_not_inside_one():
    ledger = make_ledger(groups_per_batch=1, eta=3, window=2, max_lag=5)
    actor = joined(ledger, "a1", slots=8)
    for lease in actor.ask()[1:]:
        actor.finish(lease)

    assert (train(ledger), train(ledger)) == ([1], [2])
    assert ledger.cut_batch(2) is None  # group 0 has been overtaken twice
    assert "group 0" in ledger.wait_reason(60.0) and "a1 for 60 s" in ledger.wait_reason(60.0)


@pytest.mark.parametrize("on_stale", ["reissue", "drop"])
def test_a_stale_group_never_reaches_a_batch(on_stale):
    ledger = make_ledger(groups_per_batch=1, eta=1, window=2, max_lag=1, on_stale=on_stale)
    actor, other = joined(ledger, "a1", slots=1), joined(ledger, "a2", slots=8)
    (first,) = actor.ask()
    for version in range(2):  # two later groups overtake the first one
        other.install(version)
        other.finish(other.ask()[0])
        train(ledger)
    other.install(2)

    actor.install(2)
    actor.finish(first, versions=[(1, 0), (1, 1), (1, 2)])

    counts = ledger.counters()
    assert counts["num_rejected_stale"] == 1 and counts["num_tokens_stale"] == 6
    again = [lease.ref for lease in other.ask()] + [lease.ref for lease in actor.ask()]
    assert ((0, 1) in again) == (on_stale == "reissue")
    assert counts["num_groups_dropped"] == (on_stale == "drop")


def test_a_group_that_aged_in_the_queue_is_judged_anew_when_it_comes_back():
    ledger = make_ledger(groups_per_batch=1, eta=1, window=2, max_lag=1, on_stale="reissue")
    actor, other = joined(ledger, "a1", slots=1), joined(ledger, "a2", slots=8)
    (first,) = actor.ask()
    other.finish(other.ask()[0])
    train(ledger)
    other.install(1)
    other.finish(other.ask()[0])
    assert cut(ledger) is not None  # in training, while the next batch is cut ahead
    actor.finish(first, versions=[(1, 0)] * 3)  # fresh enough on arrival

    assert ledger.cut_batch(2) is None
    end_batch(ledger, 2)
    publish(ledger, VersionRef(1, 2))
    actor.install(2)
    (again,) = actor.ask()
    assert again.ref == (0, 1)
    actor.finish(again, versions=[(1, 2)] * 3)

    assert train(ledger) == [0]


def test_masking_trains_the_young_suffix_of_an_old_sequence():
    ledger = make_ledger(groups_per_batch=1, eta=1, window=2, max_lag=1, mode="mask_old_tokens")
    actor, other = joined(ledger, "a1", slots=1), joined(ledger, "a2", slots=8)
    (first,) = actor.ask()
    for version in range(2):
        other.install(version)
        other.finish(other.ask()[0])
        train(ledger)

    actor.finish(first, versions=[(1, 0), (1, 1), (1, 2)])
    (group,) = ledger.cut_batch(2)

    assert [one.head_lag for one in group.members] == [1, 1]
    assert [one.num_action_tokens for one in group.members] == [3, 3]  # masked tokens stay in the denominator
    assert ledger.counters()["num_lag_violations"] == 0


def test_a_skipped_batch_is_quarantined_and_its_prompts_are_accounted_for():
    ledger = make_ledger(groups_per_batch=2, eta=0, window=0, max_lag=0)
    actor = joined(ledger)
    for lease in actor.ask():
        actor.finish(lease)

    train(ledger, skipped=True)

    assert ledger.version == 0
    assert ledger.counters()["num_dropped_quarantined"] == 2
    assert [lease.group_id for lease in actor.ask()] == [2, 3]
    ledger.check()


def test_cutting_or_training_out_of_turn_is_an_error():
    ledger = make_ledger(groups_per_batch=1, eta=0)
    with pytest.raises(ValueError, match="the learner is at 0"):
        ledger.cut_batch(1)
    with pytest.raises(ValueError, match="no batch was cut"):
        end_batch(ledger, 1)


def test_the_wait_has_a_name():
    ledger = make_ledger(groups_per_batch=1, eta=0, window=0, max_lag=0)
    assert "no actor is connected" in ledger.wait_reason(0.0)
    actor = joined(ledger, "a1", ref=VersionRef(1, 0))
    assert "a1 is READY with version 1:0 and 0 free slots" in ledger.wait_reason(0.0)
    (lease,) = actor.ask()
    assert "with actor a1 for 3 s, 0 of 2 members done" in ledger.wait_reason(3.0)
    ledger.evict("a1", 4.0)
    assert "group 0 (prompt" in ledger.wait_reason(4.0) and "waits for an actor" in ledger.wait_reason(4.0)


# --- the plan -------------------------------------------------------------------------------------------------------


def test_whole_groups_go_to_one_rank_and_every_member_has_a_row():
    rows = plan_batch([held(4, tokens=9), held(5, tokens=1), held(6, tokens=8)], 2)

    assert [(row.group_id, row.index, row.rank) for row in rows] == [
        (4, 0, 0), (4, 1, 0), (5, 0, 1), (5, 1, 1), (6, 0, 1), (6, 1, 1)
    ]
    assert (rows[0].num_tokens, rows[0].num_action_tokens, rows[1].reward, rows[0].head_lag) == (9, 4, 1.0, 1)


@STEADY
@given(st.lists(st.integers(1, 500), min_size=3, max_size=6), st.integers(1, 3))
def test_the_fullest_rank_has_at_most_a_third_more_than_the_best_of_all_plans(tokens, num_ranks):
    groups = [held(i, tokens=one) for i, one in enumerate(tokens)]

    rows = plan_batch(groups, num_ranks)

    load = [sum(row.num_tokens for row in rows if row.rank == rank) for rank in range(num_ranks)]
    best = min(
        max(sum(2 * one for one, rank in zip(tokens, plan, strict=True) if rank == r) for r in range(num_ranks))
        for plan in product(range(num_ranks), repeat=len(tokens))
    )
    assert min(load) > 0, "a rank without a group cannot take part"
    assert max(load) <= 4 / 3 * best
    assert rows == plan_batch(groups, num_ranks)


def test_more_ranks_than_groups_is_an_error():
    with pytest.raises(ValueError, match="1 groups cannot be split over 2 ranks"):
        plan_batch([held(0)], 2)
    with pytest.raises(ValueError, match="3 groups cannot be split over 2 equal minibatches"):
        plan_batch([held(0), held(1), held(2)], 1, 2)


def test_minibatches_are_the_same_for_any_number_of_ranks_and_each_rank_has_a_part_of_every_one():
    groups = [held(number, tokens=tokens) for number, tokens in enumerate((9, 1, 1, 8, 2, 2, 2, 7))]
    alone, two = plan_batch(groups, 1, 2), plan_batch(groups, 2, 2)

    assert [row.minibatch for row in alone] == [row.minibatch for row in two]
    assert {(row.group_id, row.minibatch) for row in two} == {(number, number // 4) for number in range(8)}
    assert {(row.rank, row.minibatch) for row in two} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert [row.rank for row in plan_batch(groups, 2)] != [row.rank for row in two]  # balanced inside each


# --- filters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards, dropped", [((0.1, 0.1, 0.1), True), ((0.0, 1e-9), True), ((0.0, 1.0), False),
                                              ((0.3,), False)])
def test_groups_without_spread_carry_no_gradient(rewards, dropped):
    assert (zero_std()(held(0, rewards=rewards)) == "zero_std") is dropped


@pytest.mark.parametrize("brevity, dropped", [((0.5, 0.5), True), ((0.5, 0.6), False)])
def test_where_scores_are_trained_on_their_spread_counts_and_not_the_rewards(brevity, dropped):
    scores = [{"score": 1.0, "brevity": short} for short in brevity]
    judge = zero_std(scores=("score", "brevity"))

    assert (judge(held(0, rewards=(1.0, 1.0), scores=scores)) == "zero_std") is dropped
    assert (judge(held(0, rewards=(0.0, 1.0), scores=scores)) == "zero_std") is dropped


@pytest.mark.parametrize("rewards, dropped", [((0.0, 0.0), True), ((1.0, 1.0), True), ((0.0, 1.0), False)])
def test_groups_that_are_all_right_or_all_wrong_are_dropped(rewards, dropped):
    assert (accuracy_range()(held(0, rewards=rewards)) == "accuracy_range") is dropped


def test_accuracy_is_the_answer_score_if_there_is_one():
    group = held(0, rewards=(0.0, 1.0), scores=[{"ans_acc": 1.0, "score": 0.0}, {"score": 1.0}])

    assert accuracy_range()(group) == "accuracy_range"


def test_the_first_reason_counts():
    judge = first_of(zero_std(), accuracy_range())

    assert (judge(held(0, rewards=(1.0, 1.0))), judge(held(0))) == ("zero_std", None)
