"""Which groups enter a batch, and the overlong penalty."""

from __future__ import annotations

import statistics

import pytest
import torch

import streamrl.algorithms as alg


@pytest.mark.parametrize("seed", range(5))
def test_informative_groups_have_a_std_of_at_least_the_bound(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 2, (24,), generator=generator).double()
    ids = torch.arange(24)[torch.randperm(24, generator=generator)] // 3

    for bound in (1e-6, 0.58):
        keep = alg.informative_groups(scores, ids, min_std=bound)
        for i in range(24):
            group = [float(s) for s, g in zip(scores, ids, strict=True) if g == ids[i]]
            assert bool(keep[i]) == (statistics.stdev(group) >= bound)


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.3, 1 / 3])
def test_equal_scores_are_never_informative_even_after_rounding(value):
    assert not alg.informative_groups(torch.full((7,), value), torch.zeros(7).long()).any()
    assert not alg.informative_groups(torch.full((7,), value, dtype=torch.float64), torch.zeros(7).long()).any()


def test_a_group_of_one_is_kept():
    keep = alg.informative_groups(torch.tensor([1.0, 1.0, 0.3]), torch.tensor([0, 0, 1]))

    assert keep.tolist() == [False, False, True]


def test_accuracy_lies_strictly_inside_the_range():
    accuracies = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.5])
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])

    assert alg.accuracy_in_range(accuracies, ids).tolist() == [False] * 4 + [True] * 4
    assert alg.accuracy_in_range(accuracies, ids, low=0.5, high=0.99).tolist() == [False] * 8
    assert alg.accuracy_in_range(accuracies, ids, low=0.49, high=0.51).tolist() == [False] * 4 + [True] * 4


def test_overlong_penalty_without_a_cache_zone_is_a_step():
    penalty = alg.overlong_penalty(torch.tensor([9, 10, 11]), max_tokens=10, cache_tokens=0)

    assert penalty.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("length", range(15))
def test_overlong_penalty_is_its_three_cases(length):
    limit, cache = 10, 4
    expected = 0.0 if length <= 6 else -1.0 if length > limit else ((limit - cache) - length) / cache

    assert float(alg.overlong_penalty(torch.tensor([length]), max_tokens=limit, cache_tokens=cache)) == expected


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: alg.informative_groups(torch.zeros(2), torch.zeros(3)), r"\[3\].*\[2\]"),
        (lambda: alg.informative_groups(torch.zeros(2), torch.zeros(2), min_std=-1.0), "min_std=-1.0"),
        (lambda: alg.accuracy_in_range(torch.zeros(2), torch.zeros(2), low=0.9, high=0.1), "low=0.9 and high=0.1"),
        (lambda: alg.overlong_penalty(torch.zeros(2), max_tokens=4, cache_tokens=5), "cache_tokens=5 and max_tokens=4"),
        (lambda: alg.overlong_penalty(torch.zeros(2, 2), max_tokens=4, cache_tokens=1), r"\[2, 2\]"),
    ],
)
def test_wrong_shapes_and_knobs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
