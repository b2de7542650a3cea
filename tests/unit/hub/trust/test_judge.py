"""Outliers among actors: those of a slow transcription, and honest actors never."""

import math
import statistics

import numpy as np
import pytest

from learner.hub.observers.trust import NUM_KEPT, NUM_LEAST, Outlier, Recent, judge, median_of_others

LIMIT = 8.0


def outliers(values: dict[str, list[float]], limit: float = LIMIT) -> list[Outlier]:
    return judge({name: recent(one) for name, one in values.items()}, limit=limit, floor=0.01)


def recent(values: list[float]) -> Recent:
    made = Recent()
    for value in values:
        made.add(value)
    return made


def slow_errors(values: dict[str, list[float]], actor: str, floor: float) -> float:
    """The distance of one actor from the others in standard errors, word by word."""
    means = {name: sum(one) / len(one) for name, one in values.items()}
    errors = {}
    for name, one in values.items():
        errors[name] = sum((x - means[name]) ** 2 for x in one) / (len(one) - 1) / len(one)
    others = [name for name in values if name != actor]
    center = statistics.median([means[name] for name in others])
    mad = statistics.median([abs(means[name] - center) for name in others])
    variance = (1.4826 * mad) ** 2 + errors[actor] + statistics.median([errors[name] for name in others])
    return abs(means[actor] - center) / max(math.sqrt(variance), floor)


@pytest.mark.parametrize("num_actors", [3, 4, 17, 32])
@pytest.mark.parametrize("seed", range(20))
def test_outliers_are_those_of_the_slow_transcription(seed, num_actors):
    random = np.random.default_rng(seed)
    names = [f"actor-{number}" for number in range(num_actors)]
    judged = {name: random.normal(random.choice([0.0, 0.0, 1.0]), 1.0, 40).tolist() for name in names}
    expected = {name: slow_errors(judged, name, 0.01) for name in names}
    beyond = {name for name in names if expected[name] > 2.0}

    found = outliers({**judged, "short": [100.0] * (NUM_LEAST - 1)}, limit=2.0)

    assert {one.actor_id for one in found} == (beyond if 2 * len(beyond) < num_actors else set())
    assert all(one.errors == pytest.approx(expected[one.actor_id]) for one in found)


@pytest.mark.parametrize("draw", [
    lambda random: float(random.random() < 0.02), lambda random: random.normal(), lambda random: random.lognormal(0, 2),
    lambda random: 1000.0 * (random.random() < 0.003), lambda random: 0.0,
], ids=["rare successes", "normal", "heavy tail", "jackpots", "all alike"])
@pytest.mark.parametrize("num_actors", [3, 8])
def test_honest_actors_are_never_outliers(draw, num_actors):
    random = np.random.default_rng(1)
    for _ in range(100):
        values = {str(actor): [draw(random) for _ in range(NUM_KEPT)] for actor in range(num_actors)}
        assert outliers(values) == []


def test_two_actors_cannot_tell_which_of_them_is_wrong_and_halves_cannot_either():
    zero, one = [0.0] * NUM_LEAST, [1.0] * NUM_LEAST
    assert outliers({"a": zero, "b": one}) == []
    assert outliers({"a": zero, "b": zero, "c": one, "d": one}) == []
    assert [found.actor_id for found in outliers({"a": zero, "b": zero, "c": one})] == ["c"]


def test_a_new_value_changes_the_summary_and_the_oldest_one_leaves_it():
    one = recent([0.0] * NUM_KEPT)
    assert one.summary == (0.0, 0.0)
    one.add(float(NUM_KEPT))
    assert one.summary[0] == pytest.approx(1.0) and len(one) == NUM_KEPT


@pytest.mark.parametrize("num", [2, 3, 4, 9, 10])
def test_the_median_of_the_others_leaves_each_value_out_in_turn(num):
    values = np.random.default_rng(num).integers(0, 4, num).astype(float)  # with equal ones
    assert median_of_others(values).tolist() == [statistics.median(np.delete(values, place)) for place in range(num)]
