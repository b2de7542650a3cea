"""Coefficient controllers beyond their golden vectors: bounds, direction, memory, closed loops."""

import math

import pytest

import streamrl.algorithms as alg

CONTROLLERS = {
    "exponential": alg.kl_exponential,
    "linear": alg.kl_linear,
    "pid": alg.kl_pid,
    "horizon": lambda s, k, **kw: alg.kl_horizon(s, k, num_trajectories=100, horizon=1000, **kw),
    "doubling": alg.kl_doubling,
    "log_integral": alg.kl_log_integral,
}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_too_much_kl_raises_the_coefficient_and_too_little_lowers_it(name):
    step, state = CONTROLLERS[name], alg.KlState(0.2)

    assert step(state, 0.05).coef > 0.2
    assert step(state, 0.001).coef < 0.2
    assert state.coef == 0.2


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize("kl", [0.0, 1e9])
def test_the_coefficient_never_leaves_its_bounds(name, kl):
    state = alg.KlState(0.2)
    for _ in range(3000):
        state = CONTROLLERS[name](state, kl, low=0.01, high=0.5)
        assert 0.01 <= state.coef <= 0.5

    assert state.coef == pytest.approx(0.01 if kl == 0.0 else 0.5)


@pytest.mark.parametrize("name", ["linear", "log_integral", "horizon", "pid"])
def test_a_closed_loop_settles_at_the_target(name):
    # The controlled process: KL falls with the coefficient.
    state, kl = alg.KlState(0.2), 0.0
    for _ in range(20_000):
        kl = 0.004 / (state.coef + 0.01)
        state = CONTROLLERS[name](state, kl)

    assert kl == pytest.approx(0.01, rel=0.05)


def test_pid_integral_does_not_wind_up():
    state = alg.KlState(0.2)
    for _ in range(1000):
        state = alg.kl_pid(state, 5.0, integral_bound=1.0)

    assert state.integral == 1.0
    assert state.previous_error == pytest.approx(4.99)


def test_doubling_is_strict_at_its_bounds():
    state = alg.KlState(0.2)

    assert alg.kl_doubling(state, 0.25, target=0.15 / 0.9).coef == 0.2  # 1.5 target = 0.25
    assert alg.kl_doubling(state, 0.5, target=0.75).coef == 0.2  # target / 1.5 = 0.5
    assert alg.kl_doubling(state, 0.2501, target=0.15 / 0.9).coef == 0.4
    assert alg.kl_doubling(state, 0.4999, target=0.75).coef == 0.1


def test_horizon_error_is_clipped():
    state = alg.KlState(1.0)

    huge = alg.kl_horizon(state, 99.0, num_trajectories=50, horizon=100, clip=0.2)

    assert huge.coef == pytest.approx(1 + 0.2 * 0.5)


@pytest.mark.parametrize("kind", ["cosine", "linear", "exponential", "warmup_cosine"])
def test_schedules_stay_at_their_end(kind):
    assert alg.kl_schedule(10**9, kind=kind) == alg.kl_schedule(1000, kind=kind)


def test_entropy_coefficient_rises_below_the_target_and_falls_at_it():
    assert alg.entropy_coef_update(0.1, 0.5, target=0.6, step=0.01) == pytest.approx(0.11)
    assert alg.entropy_coef_update(0.1, 0.6, target=0.6, step=0.01) == pytest.approx(0.09)
    assert alg.entropy_coef_update(0.0, 0.9, target=0.6) == 0.0
    assert alg.entropy_coef_update(1.0, 0.1, target=0.6) == 1.0


def test_upper_clip_follows_the_sign_of_the_entropy_error():
    assert alg.clip_high_update(0.28, 0.5, target=0.6, step=0.01) == pytest.approx(0.29)
    assert alg.clip_high_update(0.28, 0.6, target=0.6, step=0.01) == 0.28
    assert alg.clip_high_update(0.28, 0.7, target=0.6, step=0.01) == pytest.approx(0.27)
    assert alg.clip_high_update(0.5, 0.1, target=0.6) == 0.5
    assert alg.clip_high_update(0.2, 0.9, target=0.6) == 0.2


def test_log_integral_survives_a_runaway_kl():
    assert alg.kl_log_integral(alg.KlState(0.2), 1e300).coef == 10.0
    assert math.isfinite(alg.kl_log_integral(alg.KlState(0.2), 1e300, high=1e60).coef)
