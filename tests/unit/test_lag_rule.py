"""The lag rule by exhaustion over small numbers; `tests/unit/hub/ledger/test_lag_bound.py` walks the ledger itself."""

from __future__ import annotations

from itertools import product

import pytest

from streamrl.lag_rule import LagRule
from tests.kit.each import each

CASES = list(product([1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 5, 8], [1, 3]))  # B, eta, W, S


def rule_of(groups_per_batch: int, eta: int, window: int, steps_per_batch: int) -> LagRule:
    return LagRule(
        eta=eta, window=window, groups_per_batch=groups_per_batch, max_lag=99, steps_per_batch=steps_per_batch
    )


def latest_training(rule: LagRule, rank: int) -> int:
    """The last version at which a group of this rank may be trained: all before it, and W later ones, came first."""
    num_before = rank
    while rule.may_overtake(num_before - rank + 1):
        num_before += 1
    batch = num_before // rule.groups_per_batch
    return max(batch * rule.steps_per_batch + step for step in range(rule.steps_per_batch))


@each("case", CASES)
def test_the_bound_is_the_largest_lag_that_grants_and_window_allow(case):
    rule = rule_of(*case)
    lags = {
        latest_training(rule, rank) - installed
        for installed in range(13) for rank in range(60) if rule.may_grant(rank, installed)
    }

    unset = LagRule.from_settings(
        max_lag=None, eta=rule.eta, window=rule.window, groups_per_batch=rule.groups_per_batch,
        steps_per_batch=rule.steps_per_batch,
    )
    assert max(lags) == rule.bound == unset.max_lag


@each("case", CASES)
def test_an_actor_with_the_newest_weights_may_take_every_group_that_capacity_allows(case):
    rule = rule_of(*case)
    for version in range(5):
        capacity, newest = rule.capacity(version * rule.groups_per_batch), version * rule.steps_per_batch
        assert [rule.may_grant(rank, newest) for rank in range(capacity + 1)] == [True] * capacity + [False]


def test_a_token_exactly_at_the_bound_may_be_trained_at_the_last_step_of_its_batch():
    assert rule_of(8, 2, 0, 1).oldest_trainable(10, 4) == 6
    assert rule_of(8, 2, 0, 3).oldest_trainable(10, 4) == 8  # steps at 10, 11 and 12


def test_versions_published_inside_a_batch_give_no_lead_before_the_batch_is_done():
    rule = rule_of(2, 1, 0, 4)

    assert [max(rank for rank in range(20) if rule.may_grant(rank, version)) for version in range(9)] == \
        [3, 3, 3, 3, 5, 5, 5, 5, 7]


def test_a_bound_moves_with_the_lead_and_keeps_its_distance():
    rule = LagRule(eta=2, window=9, groups_per_batch=8, max_lag=5)

    assert rule.at_eta(0) == LagRule(eta=0, window=9, groups_per_batch=8, max_lag=3)
    assert rule.at_eta(4).at_eta(2) == rule
    several = LagRule.from_settings(eta=2, window=9, groups_per_batch=8, steps_per_batch=3, max_lag=None)
    assert several.at_eta(4).max_lag == several.at_eta(4).bound == 3 * (4 + 2) + 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups_per_batch": 0}, "groups_per_batch=0 must be at least 1"),
        ({"steps_per_batch": 0}, "steps_per_batch=0"), ({"steps_per_batch": 2, "max_lag": 4}, "max_lag=4 is below 5"),
        ({"window": -1}, "window=-1"),
        ({"force": 1}, "force=1 is not eta=2"),
        ({"eta": -1}, "eta=-1"), ({"max_lag": 1}, "max_lag=1 is below 2, .*raise max_lag or lower eta"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused_with_the_numbers(changes, words):
    rule = LagRule(**{"eta": 2, "window": 0, "groups_per_batch": 8, "max_lag": 2} | changes)

    with pytest.raises(ValueError, match=words):
        rule.check()
