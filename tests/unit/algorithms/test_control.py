"""Adaptive staleness control: fixed points, stability, and loops closed around a simulated drift."""

import itertools
import math
import random

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces
from tests.kit.each import each

from .rows import random_rows

LINEAR = alg.DriftModel((0.0, 1.0, 2.0, 4.0), (1e3,) * 4, (0.0, 0.001, 0.002, 0.004), (0.0,) * 4)


def test_lag_for_ess_at_the_ends():
    fit = alg.DriftFit(floor=0.01, scale=1e-3, exponent=1.0, standard_error=0.0)

    assert alg.lag_for_ess(fit, num_effective_tokens=1000) == 0.0  # the floor alone is too much
    still = alg.DriftFit(floor=0.0, scale=0.0, exponent=1.0, standard_error=0.0)
    assert alg.lag_for_ess(still, num_effective_tokens=10) == math.inf
    lag = alg.lag_for_ess(fit, ess_target=0.5, num_effective_tokens=20)
    assert pieces.predict_ess(0.01 + 1e-3 * lag, 20) == pytest.approx(0.5)


@pytest.mark.parametrize("target, end", [(30.0, 30), (1.0, 1), (math.inf, 64), (0.0, 1)])
def test_the_lag_bound_moves_by_single_steps_to_its_target(target, end):
    bound = alg.LagBound(smoothed=8.0, value=8)
    values = []
    for _ in range(5000):
        bound = alg.step_lag_bound(bound, target, high=64)
        values.append(bound.value)

    assert abs(bound.value - end) <= 1
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise([8, *values]))


def test_smoothing_is_limited_by_the_delay_it_causes():
    bound = alg.LagBound(smoothed=10.0, value=10)

    assert alg.step_lag_bound(bound, 20.0, high=64).smoothed == pytest.approx(10.5)


def closed_loop(step, *, budget, num_steps=3000, start=4):
    """Drift grows with the lag in force `value` steps ago, and the target shrinks with the measured drift."""
    history, bound, targets = [start], alg.LagBound(smoothed=float(start), value=start), []
    for _ in range(num_steps):
        in_force = history[max(0, len(history) - 1 - bound.value)]
        targets.append(budget / in_force)  # the more lag there was, the less is affordable now
        bound = step(bound, targets[-1])
        history.append(bound.value)
    return history


@pytest.mark.parametrize("budget", [25.0, 100.0, 900.0])
def test_the_lag_bound_settles_under_a_response_delayed_by_its_own_value(budget):
    history = closed_loop(lambda bound, target: alg.step_lag_bound(bound, target, high=64), budget=budget)

    tail = history[-1000:]
    assert max(tail) - min(tail) <= 1
    assert abs(sum(tail) / len(tail) - math.sqrt(budget)) <= 1.5


def test_without_smoothing_the_same_loop_cycles():
    def jump(bound, target):
        value = int(min(64, max(1, target)))
        return alg.LagBound(smoothed=float(value), value=value)

    tail = closed_loop(jump, budget=100.0)[-1000:]

    assert max(tail) - min(tail) > 10


def climb(state, curve, num_samples, noise, seed):
    generator = random.Random(seed)
    visited = []
    for _ in range(num_samples):
        state = alg.step_goodput(state, curve(state.eta) + noise * generator.gauss(0, 1))
        visited.append(state.eta)
    return state, visited


@each("seed", range(5))
@pytest.mark.parametrize("start", [0, 3, 14])
def test_goodput_climbs_to_the_best_eta(start, seed):
    # Throughput saturates with eta while ESS falls: the best product is at 6.
    def curve(eta):
        return 1.0 - 0.02 * (eta - 6) ** 2

    _, visited = climb(alg.GoodputState(eta=start), curve, 3000, 0.01, seed)

    tail = visited[-600:]
    assert abs(sum(tail) / len(tail) - 6) < 1.0
    assert min(visited) >= 0


def test_goodput_does_not_move_on_noise():
    _, visited = climb(alg.GoodputState(eta=5), lambda eta: 1.0, 4000, 0.1, 0)

    # It tries neighbors, one arm at a time, but stays near: a false acceptance has odds of 1 in 40.
    assert max(abs(eta - 5) for eta in visited) <= 4


def test_goodput_arms_have_their_length_and_turn_after_a_failure():
    state = alg.GoodputState(eta=3)
    for value in (1.0, 1.1, 0.9):
        state = alg.step_goodput(state, value, num_steps=3)
    assert (state.eta, len(state.baseline), state.current) == (4, 3, ())
    for value in (0.5, 0.6, 0.4):
        state = alg.step_goodput(state, value, num_steps=3)
    assert (state.eta, state.direction, state.baseline) == (3, -1, ())
    for value in (1.0, 1.1, 0.9, 2.0, 2.1, 1.9):
        state = alg.step_goodput(state, value, num_steps=3)
    assert (state.eta, state.direction, state.baseline) == (1, -1, (2.0, 2.1, 1.9))
    assert alg.goodput(3.0, 0.5) == 1.5


@pytest.mark.parametrize(("better", "eta"), [(0.25, 3), (0.4, 5)])
def test_a_neighbor_is_taken_when_it_is_better_by_a_t_of_two(better, eta):
    """Of two values each, 0.2 apart, the mean has a standard error of 0.1: t is 1.8 and 2.8."""
    state = alg.GoodputState(eta=3)
    for value in (1.0, 1.2, 1.0 + better, 1.2 + better):
        state = alg.step_goodput(state, value, num_steps=2)

    assert state.eta == eta


def test_goodput_turns_round_at_zero():
    state = alg.GoodputState(eta=0, direction=-1)
    for value in (1.0, 1.1):
        state = alg.step_goodput(state, value, num_steps=2)

    assert (state.eta, state.direction) == (1, 1)


@pytest.mark.parametrize(
    "ess, knobs, expected",
    [
        (0.25, {}, math.sqrt(0.25)),
        (0.25, {"rule": "linear"}, 0.25),
        (0.25, {"rule": "none"}, 1.0),
        (1.5, {}, 1.0),
        (0.001, {}, 0.1),
        (0.025, {"rule": "linear"}, 0.1),
        (0.025, {"rule": "linear", "floor": 0.0}, 0.025),
    ],
)
def test_lr_scale(ess, knobs, expected):
    assert alg.lr_scale(ess, **knobs) == pytest.approx(expected)


def test_clip_bounds_use_floors_so_that_fresh_data_are_clipped_as_usual():
    rows = random_rows(0, drift=1e-3)

    bounds = alg.clip_from_budget(rows.policy - rows.behavior, rows.advantages, rows.mask)

    assert bounds == alg.ClipBounds(eps_low=1.0, eps_high=math.inf, log_cap=math.inf)
    tight = alg.clip_from_budget(rows.policy - rows.behavior, rows.advantages, rows.mask, budget=0.0)
    assert tight == alg.ClipBounds(eps_low=0.2, eps_high=0.28, log_cap=0.0)


@each("seed", range(5))
def test_zscore_keep_drops_harmful_tokens_unusual_for_their_lag(seed):
    rows = random_rows(seed, drift=1.0)

    keep = alg.zscore_keep(rows.log_ratios, rows.advantages, rows.lag_m2, rows.mask, z_bound=2.0, log_bound=1.2)

    for i, j in rows.mask.nonzero().tolist():
        x, a, m2 = (float(t[i, j]) for t in (rows.log_ratios, rows.advantages, rows.lag_m2))
        harmful = (a > 0 and x > 0) or (a < 0 and x < 0)
        assert bool(keep[i, j]) == (not (harmful and (abs(x) / math.sqrt(m2) > 2.0 or abs(x) > 1.2)))


def test_zscore_keep_drops_harmful_tokens_beyond_either_bound_in_both_directions():
    log_ratios = torch.tensor([[1.3, -1.3, 1.3, 1.0, -1.0, 1.0]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, -1.0, -1.0]])
    lag_m2, mask = torch.tensor([[4.0, 4.0, 4.0, 0.04, 0.04, 0.04]]), torch.ones(1, 6, dtype=torch.bool)

    keep = alg.zscore_keep(log_ratios, advantages, lag_m2, mask, z_bound=2.0, log_bound=1.2)

    assert keep.tolist() == [[False, False, True, False, False, True]]


def test_zscore_keep_of_identical_policies_drops_nothing():
    zeros, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)

    assert alg.zscore_keep(zeros, zeros + 1, zeros, mask).all()


@each("seed", range(10))
def test_23_rho_bar_for_ess_is_the_largest_cap_that_reaches_the_target(seed):
    generator = torch.Generator().manual_seed(seed)
    log_ratios = 0.4 * torch.randn(40, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(40, 6, dtype=torch.bool)

    def ess(cap):
        return float(pieces.ess_report(log_ratios, mask, cap=cap).sequence_clipped)

    target = (ess(1.0) + ess(10.0)) / 2
    cap = alg.rho_bar_for_ess(log_ratios, mask, ess_target=target)
    assert ess(cap) >= target - 1e-12
    assert ess(cap * (1 + 1e-9)) < target or ess(cap + 1e-6) < target
    assert alg.rho_bar_for_ess(log_ratios, mask, ess_target=1.0) == 1.0
    assert alg.rho_bar_for_ess(log_ratios, mask, ess_target=ess(10.0) * 0.999) == 10.0


@pytest.mark.parametrize("target, expected", [(0.0161, 4), (0.0079, 1), (0.0401, 10), (0.0039, 0)])
def test_spread_budget_is_the_largest_affordable_spread(target, expected):
    # m2(d) = 0.001 d, a quarter of the target is allowed
    assert alg.spread_budget(LINEAR, m2_target=target) == expected


def test_spread_budget_at_the_ends():
    mismatch = alg.DriftModel((0.0, 1.0), (1.0, 1.0), (0.5, 0.6), (0.0, 0.0))
    assert alg.spread_budget(mismatch, m2_target=0.04) == 0
    still = alg.DriftModel((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    assert alg.spread_budget(still, m2_target=0.04) == 2**20


CALM = {"ess": 0.9, "step_scale": 1.0, "grad_norm": 1.0, "oscillation": 0.0, "queue_lag": 5}


def drive(state, num_steps, **changes):
    for _ in range(num_steps):
        state = alg.step_breaker(state, **(CALM | changes))
    return state


def test_a_calm_run_stays_normal():
    assert drive(alg.BreakerState(), 500).mode == "normal"


@pytest.mark.parametrize(
    "trouble",
    [
        {"ess": 0.29},
        {"ess": float("nan"), "queue_lag": 0},
        {"grad_norm": 5.1},
        {"grad_norm": float("nan")},
        {"grad_norm": float("inf")},
        {"oscillation": 0.31},
    ],
)
def test_one_troubled_step_makes_it_cautious_and_twenty_healthy_ones_bring_it_back(trouble):
    state = drive(alg.BreakerState(), 30)

    state = drive(state, 1, **trouble)
    assert state.mode == "cautious"
    assert math.isfinite(state.grad_norm_ewma)
    assert drive(state, 19).mode == "cautious"
    assert drive(state, 20).mode == "normal"


def test_five_steps_at_the_learning_rate_floor_make_it_cautious():
    state = drive(alg.BreakerState(), 4, step_scale=0.1)
    assert state.mode == "normal"
    assert drive(state, 1).num_floor_steps == 0
    assert drive(state, 1, step_scale=0.1).mode == "cautious"


def test_a_collapse_drains_until_the_queue_is_fresh_and_cannot_hang_there():
    state = drive(alg.BreakerState(), 1, ess=0.05)
    assert state.mode == "drain"
    assert drive(state, 3, ess=0.05, queue_lag=2).mode == "drain"

    fresh = drive(state, 1, ess=0.05, queue_lag=1)
    assert fresh.mode == "cautious"  # still in trouble, but there is nothing left to drain
    assert drive(fresh, 1, ess=0.05, queue_lag=1).mode == "cautious"
    assert drive(state, 20).mode == "cautious"
    assert drive(state, 40).mode == "normal"


def test_a_gradient_spike_does_not_raise_the_bar_for_the_next_one():
    state = drive(alg.BreakerState(), 50)

    state = drive(state, 1, grad_norm=1e6)

    assert state.grad_norm_ewma == pytest.approx(0.95 + 0.05 * 5)


def test_publish_when_the_policy_has_moved():
    assert not alg.should_publish(0.01, m2_target=0.04)
    assert alg.should_publish(0.0101, m2_target=0.04)
