"""The overlong penalty."""

import pytest
import torch

import streamrl.algorithms as alg


def test_overlong_penalty_without_a_cache_zone_is_a_step():
    penalty = alg.overlong_penalty(torch.tensor([9, 10, 11]), max_tokens=10, cache_tokens=0)

    assert penalty.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("length", range(15))
def test_overlong_penalty_is_its_three_cases(length):
    limit, cache = 10, 4
    expected = 0.0 if length <= 6 else -1.0 if length > limit else ((limit - cache) - length) / cache

    assert float(alg.overlong_penalty(torch.tensor([length]), max_tokens=limit, cache_tokens=cache)) == expected
