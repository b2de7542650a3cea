"""The lag rule by exhaustion over small numbers; the ledger's own walks are in `tests/unit/hub/test_lag_bound.py`."""

from __future__ import annotations

from itertools import product

import pytest

from streamrl import lag_rule

CASES = list(product([1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 5, 8]))  # B, eta, W


def latest_training(rank: int, window: int, groups_per_batch: int) -> int:
    """The last version at which a group of this rank may be trained: all before it, and W later ones, came first."""
    num_before = rank
    while lag_rule.may_overtake(num_before - rank + 1, window):
        num_before += 1
    return num_before // groups_per_batch


@pytest.mark.parametrize(("groups_per_batch", "eta", "window"), CASES)
def test_the_bound_is_the_largest_lag_that_grants_and_window_allow(groups_per_batch, eta, window):
    lags = {
        latest_training(rank, window, groups_per_batch) - installed
        for installed in range(6) for rank in range(60) if lag_rule.may_grant(rank, installed, eta, groups_per_batch)
    }

    assert max(lags) == lag_rule.lag_bound(eta, window, groups_per_batch)


@pytest.mark.parametrize(("groups_per_batch", "eta", "window"), CASES)
def test_an_actor_with_the_newest_weights_may_take_every_group_that_capacity_allows(groups_per_batch, eta, window):
    for version in range(5):
        capacity = lag_rule.capacity(eta, groups_per_batch, version * groups_per_batch)
        granted = [lag_rule.may_grant(rank, version, eta, groups_per_batch) for rank in range(capacity + 1)]
        assert granted == [True] * capacity + [False]


def test_a_token_exactly_at_the_bound_may_be_trained():
    assert lag_rule.oldest_trainable(10, 4) == 6


def test_a_bound_moves_with_the_lead_and_keeps_its_distance():
    assert lag_rule.moved_max_lag(5, eta=2, new_eta=0) == 3
    assert lag_rule.lag_bound(4, 9, 8) == lag_rule.moved_max_lag(lag_rule.lag_bound(1, 9, 8), 1, 4) == 6
    assert lag_rule.least_max_lag(4) == lag_rule.lag_bound(4, window=0, groups_per_batch=8)
