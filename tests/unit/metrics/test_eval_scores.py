"""avg@k, pass@k and maj@k against literal counts."""

import itertools
import math
import random

import pytest

from streamrl.metrics.eval_scores import average, estimates, majority, pass_at, powers_of_two


def test_the_average_is_over_prompts_and_so_is_its_error():
    estimate = average([[1.0, 0.0], [1.0, 1.0], [], [0.0, 0.0]])
    assert (estimate.value, estimate.num_prompts) == (0.5, 3)
    assert estimate.stderr == pytest.approx(math.sqrt(0.25 / 3))  # prompt means 0.5, 1, 0: variance 0.25
    assert math.isnan(average([]).value)
    assert math.isnan(average([[1.0]]).stderr)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one(k):
    rng = random.Random(k)
    scores = [[float(rng.random() < 0.4) for _ in range(5)] for _ in range(4)]
    literal = [
        sum(max(draw) >= 1.0 for draw in itertools.combinations(one, k)) / math.comb(5, k) for one in scores
    ]
    assert pass_at(k, scores).value == pytest.approx(sum(literal) / 4)


def test_what_counts_as_right_is_a_threshold_and_short_prompts_are_left_out():
    assert pass_at(2, [[0.5, 0.2], [0.1]], solved=0.5).value == 1.0
    assert pass_at(2, [[0.5, 0.2], [0.1]], solved=0.5).num_prompts == 1
    assert pass_at(2, [[0.5, 0.2]], solved=0.6).value == 0.0


def test_the_majority_answer_counts_and_ties_share():
    assert majority([[1.0, 0.0, 0.0]], [["4", "5", "5"]]).value == 0.0
    assert majority([[1.0, 1.0, 0.0]], [["4", "4", "5"]]).value == 1.0
    assert majority([[1.0, 0.0]], [["4", "5"]]).value == 0.5
    for scores in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]):  # one of the two equal answers had another form
        assert majority([scores], [["4", "4", "5"]]).value == 0.5


def test_the_estimates_of_an_evaluation_have_the_names_that_people_know():
    found = estimates([[1.0, 0.0], [0.0, 0.0]], [["4", "5"], ["1", "1"]], num_responses=2, solved=1.0)

    values = {name: one.value for name, one in found.items()}
    assert values == {"avg@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25}
    assert all(one.stderr == pytest.approx(0.5 if name == "pass@2" else 0.25) for name, one in found.items())
    assert list(estimates([[1.0]], [["4"]], num_responses=1, solved=1.0)) == ["avg@1"]
    assert [powers_of_two(n) for n in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]
