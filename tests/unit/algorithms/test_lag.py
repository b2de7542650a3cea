"""Lag of tokens and trajectories."""

import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from .rows import action_lists, random_rows


@each("seed", range(5))
def test_lags_are_version_differences_over_action_tokens(seed):
    rows = random_rows(seed)

    lags, summary = alg.token_lags(rows.versions, 20, rows.mask), alg.lag_summary(rows.versions, 20, rows.mask)

    for i, (versions,) in enumerate(action_lists(rows, "versions")):
        expected = [20 - v for v in versions]
        assert lags[i][rows.mask[i]].tolist() == expected
        head, tail = max(expected, default=0), min(expected, default=0)
        assert (int(summary.head[i]), int(summary.tail[i])) == (head, tail)
    assert lags.dtype == summary.head.dtype == torch.int64


def test_the_summary_sees_the_oldest_and_the_newest_token_that_is_trained_on():
    versions = torch.tensor([[5, 9], [6, 9], [10, 11], [10, 10], [-3, 9]])
    mask = torch.ones(5, 2, dtype=torch.bool)
    mask[4, 0] = False  # an old token that is not trained on does not count

    summary = alg.lag_summary(versions, 10, mask)

    assert summary.head.tolist() == [5, 4, 0, 0, 1]
    assert summary.tail.tolist() == [1, 1, -1, 0, 1]


def test_token_level_admission_masks_the_prefix():
    versions = torch.tensor([[3, 5, 6, 11]])
    mask = torch.ones(1, 4, dtype=torch.bool)

    keep = alg.lag_keep(alg.token_lags(versions, 10, mask), mask, max_lag=4)

    assert keep.tolist() == [[False, False, True, False]]


def test_old_tokens_weigh_less_step_by_step_and_young_ones_what_they_did():
    lags = torch.tensor([[6, 5, 4, 2, 0]])
    mask = torch.tensor([[True, True, True, True, False]])

    assert alg.lag_weights(lags, mask, max_lag=4, decay=0.5).tolist() == [[0.25, 0.5, 1.0, 1.0, 0.0]]


def test_a_group_is_split_into_runs_of_neighboring_lags_and_others_stay_whole():
    group_ids = torch.tensor([7, 7, 7, 7, 3, 3])
    head_lags = torch.tensor([5, 0, 1, 4, 2, 3])

    split = alg.split_by_lag(group_ids, head_lags, budget=1).tolist()

    assert split[1] == split[2] != split[3] == split[0] and split[4] == split[5]
    assert len(set(split)) == 3
    for part in set(split):
        lags = [int(lag) for lag, number in zip(head_lags, split, strict=True) if number == part]
        assert max(lags) - min(lags) == 1
    whole = alg.split_by_lag(group_ids, head_lags, budget=5).tolist()
    assert len(set(whole)) == 2
