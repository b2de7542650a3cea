"""The drift model: bins, forgetting, fit, prediction, oscillation."""

import math
import statistics

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces
from tests.kit.each import each

from .rows import random_rows


def model(lag, m2, count=None, error=None):
    n = len(lag)
    return alg.DriftModel(tuple(lag), tuple(count or [1000.0] * n), tuple(m2), tuple(error or [0.0] * n))


@each("seed", range(5))
def test_bins_hold_mean_squares_of_their_lags(seed):
    rows = random_rows(seed)
    edges = (0, 1, 3, 4)

    bins = pieces.drift_bins(rows.log_ratios, rows.lags, rows.mask, edges=edges)

    pairs = list(zip(rows.lags[rows.mask].tolist(), rows.log_ratios[rows.mask].tolist(), strict=True))
    for k in range(3):
        inside = [(d, x * x) for d, x in pairs if edges[k] <= d < edges[k + 1]]
        assert bins.count[k] == len(inside)
        if inside:
            squares = [x for _, x in inside]
            assert bins.lag[k] == pytest.approx(statistics.fmean(d for d, _ in inside))
            assert bins.m2[k] == pytest.approx(statistics.fmean(squares))
            error = statistics.stdev(squares) / math.sqrt(len(squares)) if len(squares) > 1 else 0.0
            assert bins.standard_error[k] == pytest.approx(error, abs=1e-12)
        else:
            assert (bins.lag[k], bins.m2[k], bins.standard_error[k]) == (edges[k], 0.0, 0.0)


def test_future_versions_and_lags_beyond_the_last_edge_are_left_out():
    mask = torch.ones(1, 4, dtype=torch.bool)

    bins = pieces.drift_bins(torch.ones(1, 4), torch.tensor([[-1, 0, 4, 5]]), mask, edges=(0, 1, 5))

    assert bins.count == (1.0, 1.0)


def test_old_batches_count_half_after_a_half_life():
    old = alg.DriftBins((0.0, 2.0), (100.0, 0.0), (0.5, 0.0), (0.1, 0.0))
    empty = alg.DriftBins((0.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    state = alg.update_drift(None, old)

    for _ in range(7):
        state = alg.update_drift(state, empty, half_life=7.0)

    assert state.count[0] == pytest.approx(50.0)
    assert state.m2[0] == pytest.approx(0.5)
    state = alg.update_drift(state, alg.DriftBins((0.0, 3.0), (50.0, 4.0), (0.1, 9.0), (0.1, 1.0)), half_life=1e9)
    assert state.m2[0] == pytest.approx(0.3)
    assert state.standard_error[0] == pytest.approx(0.1 / math.sqrt(2))
    assert (state.lag[1], state.count[1], state.m2[1]) == (3.0, 4.0, 9.0)


@pytest.mark.parametrize("exponent", [1.0, 1.4, 2.0])
def test_the_fit_recovers_a_power_law(exponent):
    lags = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    fit = alg.fit_drift(model(lags, [1e-3 + 2e-4 * d**exponent for d in lags]))

    assert fit.floor == 1e-3
    assert fit.scale == pytest.approx(2e-4)
    assert fit.exponent == pytest.approx(exponent)
    assert fit.standard_error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("exponent, clipped", [(0.3, 1.0), (3.0, 2.0)])
def test_the_exponent_is_clipped(exponent, clipped):
    lags = [0.0, 1.0, 2.0, 4.0]

    assert alg.fit_drift(model(lags, [1e-3 + d**exponent for d in lags])).exponent == clipped


def test_the_fit_weighs_bins_by_their_count():
    lags, values = [0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.0 * 4.0, 4.0]

    heavy = alg.fit_drift(model(lags, values, count=[1.0, 1e9, 1.0, 1e9]))

    assert heavy.scale == pytest.approx(1.0, rel=1e-4)
    assert heavy.exponent == pytest.approx(1.0, abs=1e-4)


def test_fewer_than_two_usable_bins():
    one = alg.fit_drift(model([0.0, 4.0], [0.1, 0.9], error=[0.0, 0.08]))
    assert (one.floor, one.exponent) == (0.1, 1.0)
    assert one.scale == pytest.approx(0.2)
    assert one.standard_error == pytest.approx(0.08 / 0.9)

    none = alg.fit_drift(model([0.0], [0.1]))
    assert (none.scale, none.exponent) == (0.0, 1.0)
    no_floor = alg.fit_drift(model([1.0, 2.0], [1.0, 2.0]))
    assert no_floor.floor == 0.0


def test_scatter_around_the_law_shows_in_the_standard_error():
    lags = [1.0, 2.0, 4.0, 8.0]
    logs = [math.log(d) + bump for d, bump in zip(lags, (0.1, -0.1, -0.1, 0.1), strict=True)]

    fit = alg.fit_drift(model(lags, [math.exp(x) for x in logs]))

    assert fit.standard_error == pytest.approx(math.sqrt(4 * 0.01 / 2), rel=1e-6)


def test_prediction_is_pessimistic_and_never_decreases():
    # The dip at 24 and 32 is the swing-back of delayed feedback; a larger lag is never promised to be cheaper.
    lags, values = [0.0, 4.0, 12.0, 24.0, 32.0], [0.001, 0.02, 0.11, 0.06, 0.05]
    drift = model(lags, values, error=[0.001] * 5)

    grid = [alg.predict_m2(drift, d) for d in range(0, 200)]

    assert all(a <= b + 1e-15 for a, b in zip(grid, grid[1:], strict=False))
    assert grid[0] == pytest.approx(0.002) and grid[12] == pytest.approx(0.111) == grid[24] == grid[32]
    assert grid[8] == pytest.approx((0.021 + 0.111) / 2)
    fit = alg.fit_drift(drift)
    outside = (fit.floor + fit.scale * 199**fit.exponent) * math.exp(fit.standard_error)
    assert grid[199] == pytest.approx(max(0.111, outside)) and outside > 0.111


def test_prediction_beyond_the_data_follows_the_power_law():
    lags = [0.0, 1.0, 2.0, 4.0]
    drift = model(lags, [0.01 + 0.1 * d**1.5 for d in lags])

    assert alg.predict_m2(drift, 100.0) == pytest.approx(0.01 + 0.1 * 100**1.5)


def test_below_the_data_prediction_follows_the_power_law_and_never_exceeds_the_first_bin():
    drift = model([8.0], [1.0])

    assert [alg.predict_m2(drift, d) for d in (0, 1, 4, 8)] == pytest.approx([0.0, 0.125, 0.5, 1.0])
    steep = model([4.0, 8.0], [0.4, 0.5])
    assert all(alg.predict_m2(steep, d) <= 0.4 for d in range(5)) and alg.predict_m2(steep, 4) == 0.4


def test_a_lag_that_no_longer_comes_is_forgotten():
    loud, calm = ((alg.DriftBins((0.0, 1.0, 8.0), *rest)) for rest in (
        ((0.0, 1000.0, 0.0), (0.0, 0.2, 0.0), (0.0, 0.0, 0.0)), ((0.0, 0.0, 1000.0), (0.0, 0.0, 0.005), (0.0,) * 3),
    ))
    state = None
    for bins in [loud] * 20 + [calm] * 60:
        state = alg.update_drift(state, bins)
    assert alg.predict_m2(state, 8.0) == pytest.approx(0.2) and alg.oscillation(state, 8.0) > 0.9, "still remembered"

    for _ in range(300):
        state = alg.update_drift(state, calm)

    assert alg.predict_m2(state, 8.0) == pytest.approx(0.005) and alg.oscillation(state, 8.0) == 0.0


@pytest.mark.parametrize("lag, expected", [(16, 1 - 0.098 / 0.11), (24, 1 - 0.064 / 0.11), (12, 0.0), (3, 0.0)])
def test_oscillation_is_the_depth_of_the_swing_back(lag, expected):
    drift = model([4.0, 12.0, 16.0, 24.0, 32.0], [0.02, 0.110, 0.098, 0.064, 0.170])

    assert alg.oscillation(drift, lag) == pytest.approx(expected)


def test_oscillation_of_the_pilot_at_lag_32():
    drift = model([24.0, 32.0, 40.0, 64.0], [0.33, 0.19, 0.117, 0.55])

    assert alg.oscillation(drift, 32) == pytest.approx(1 - 0.19 / 0.33)
    assert alg.oscillation(drift, 64) == 0.0
