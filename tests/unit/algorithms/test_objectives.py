"""Multi-objective selection against brute force."""

import itertools

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each


def points(seed, n, k):
    return torch.rand(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def union_of_boxes(boxes, reference):
    """Volume by inclusion and exclusion over every subset."""
    total = 0.0
    for size in range(1, len(boxes) + 1):
        for chosen in itertools.combinations(boxes, size):
            volume = 1.0
            for extents in zip(*chosen, reference, strict=True):
                volume *= max(0.0, min(extents[:-1]) - extents[-1])
            total += volume if size % 2 else -volume
    return total


@pytest.mark.parametrize("k", [2, 3, 4])
@each("seed", range(5))
def test_hypervolume_is_the_union_of_boxes(seed, k):
    cloud, reference = points(seed, 7, k), torch.full((k,), 0.2, dtype=torch.float64)

    fast = alg.hypervolume(cloud, reference)

    assert fast == pytest.approx(union_of_boxes(cloud.tolist(), reference.tolist()))


@pytest.mark.parametrize("k", [2, 3, 4])
@each("seed", range(5))
def test_contributions_are_differences_of_hypervolumes(seed, k):
    cloud, reference = points(seed, 8, k), torch.zeros(k, dtype=torch.float64)

    result = alg.hypervolume_contributions(cloud, reference)

    for i in range(8):
        rest = torch.cat([cloud[:i], cloud[i + 1 :]])
        assert float(result[i]) == pytest.approx(alg.hypervolume(cloud, reference) - alg.hypervolume(rest, reference))
    assert (result >= 0).all()


def test_26_dominated_and_duplicated_points_contribute_nothing():
    cloud = torch.tensor([[1.0, 3.0], [2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [3.0, 1.0]])

    contributions = alg.hypervolume_contributions(cloud, torch.zeros(2))

    assert contributions.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_points_below_the_reference_add_nothing():
    cloud = torch.tensor([[2.0, 2.0], [9.0, -1.0]])

    assert alg.hypervolume(cloud, torch.zeros(2)) == 4.0
    assert alg.hypervolume(cloud[:0], torch.zeros(2)) == 0.0


def test_an_archive_of_a_hundred_points_in_four_objectives_is_affordable():
    direction = points(0, 100, 4) + 0.05
    front = direction / direction.norm(dim=1, keepdim=True)

    total = alg.hypervolume(front, torch.zeros(4, dtype=torch.float64))

    assert 0 < total < 1


@each("seed", range(5))
def test_domination_counts(seed):
    cloud = (4 * points(seed, 12, 3)).round()

    counts = alg.domination_count(cloud)

    rows = cloud.tolist()
    for i, mine in enumerate(rows):
        dominating = sum(all(a >= b for a, b in zip(other, mine, strict=True)) and other != mine for other in rows)
        assert int(counts[i]) == dominating
    assert counts.dtype == torch.int64
    assert (counts == 0).any()


def test_weighted_sum_and_tchebycheff():
    cloud, weights = points(1, 6, 3), torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    ideal = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)

    assert alg.weighted_sum(cloud, weights).tolist() == pytest.approx(
        [sum(w * f for w, f in zip(weights.tolist(), row, strict=True)) for row in cloud.tolist()]
    )
    assert alg.tchebycheff(cloud, weights, ideal).tolist() == pytest.approx(
        [-max(w * abs(f - 1) for w, f in zip(weights.tolist(), row, strict=True)) for row in cloud.tolist()]
    )


def test_26_tchebycheff_is_at_most_zero_and_zero_at_the_ideal():
    cloud, weights = points(2, 6, 3), torch.ones(3, dtype=torch.float64)

    for ideal in cloud:
        values = alg.tchebycheff(cloud, weights, ideal)
        assert (values <= 0).all()
        assert float(values.max()) == 0.0


def test_scores_are_no_losses():
    cloud, two = torch.rand(4, 2, requires_grad=True), torch.ones(2)

    found = (alg.weighted_sum(cloud, two), alg.tchebycheff(cloud, two, two), alg.hypervolume_contributions(cloud, two))

    assert not any(result.requires_grad for result in found)


def test_crowding_distance():
    cloud = torch.tensor([[0.0, 8.0], [1.0, 7.0], [3.0, 5.0], [7.0, 1.0], [8.0, 0.0]], dtype=torch.float64)

    distance = alg.crowding_distance(cloud)

    assert distance.tolist() == [float("inf"), 3 / 8 + 3 / 8, 6 / 8 + 6 / 8, 5 / 8 + 5 / 8, float("inf")]
    same = torch.ones(3, 2)
    assert alg.crowding_distance(same).tolist() == [0.0, 0.0, 0.0]
    assert alg.crowding_distance(torch.zeros(0, 2)).shape == (0,)
    assert alg.crowding_distance(torch.zeros(1, 2)).tolist() == [0.0]
