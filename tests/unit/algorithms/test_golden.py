"""Golden vectors of the specification where no transcription of a formula stands beside the function; to 1e-6."""

import math

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces

D = torch.float64
# The main row: four action tokens, gamma 0.9, terminated unless said.
REWARDS, VALUES, ELL = (
    torch.tensor([row], dtype=D) for row in ([0, 0, 0.5, 1], [0.2, 0.4, 0.1, 0.3], [0.5, -0.7, 0, 1.2])
)
MASK = torch.ones(1, 4, dtype=torch.bool)
MU = torch.full((1, 4), -2.0, dtype=D)
PI = MU + ELL
END, CUT = torch.zeros(1, dtype=D), torch.full((1,), 0.5, dtype=D)


def equal(result, *expected, at=1e-6):
    numbers = result.flatten().tolist() if isinstance(result, torch.Tensor) else list(result)
    assert numbers == pytest.approx(list(expected), abs=at, rel=0)


def vtrace(**knobs):
    return alg.vtrace(MU, PI, REWARDS, VALUES, MASK, **{"bootstrap_values": END, "gamma": 0.9} | knobs)


def test_vtrace_with_all_bars_1():
    result = vtrace()

    equal(result.targets, 0.744357, 0.827063, 1.4, 1.0)
    equal(result.advantages, 0.544357, 0.86, 1.3, 0.7)
    equal(vtrace(rho_bar_pg=1.0).advantages, 0.544357, 0.427063, 1.3, 0.7)


def test_retrace_v():
    result = alg.retrace_v(MU, PI, REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, lam=0.95)
    equal(result.targets, 0.688866, 1.174567, 1.368500, 1.0)
    equal(result.advantages, 0.488866, 0.774567, 1.2685, 0.7)
    state = alg.retrace_v(MU, PI, REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, target_rho_bar=1.0)
    equal(state.targets, 0.744357, 0.827063, 1.4, 1.0)


SCORES, IDS = torch.tensor([1, 0, 0.5, 0], dtype=D), torch.zeros(4, dtype=torch.int64)
WEIGHTS = torch.tensor([1, 0.5, 2, 0.25], dtype=D)


def test_weighted_leave_one_out_falls_back_where_the_others_weigh_too_little():
    free = alg.leave_one_out(SCORES, IDS, weights=WEIGHTS, min_ess=0.0)
    equal(free, 0.363636, 0.615385, 0.571429, 0.571429)

    # ESS counts of the others: 1.753623, 2.086420, 2.333333, 2.333333
    guarded = alg.leave_one_out(SCORES, IDS, weights=WEIGHTS, min_ess=2.0)
    equal(guarded, 0.166667, 0.615385, 0.571429, 0.571429)
    for bound, row in ((1.753622, 0), (2.086419, 1), (2.333332, 2)):
        assert alg.leave_one_out(SCORES, IDS, weights=WEIGHTS, min_ess=bound)[row] == free[row]
    for bound, row in ((1.753624, 0), (2.086421, 1), (2.333334, 2)):
        assert alg.leave_one_out(SCORES, IDS, weights=WEIGHTS, min_ess=bound)[row] != free[row]


@pytest.mark.parametrize("budget, expected", [(0.04, 0.2), (0.5, 0.866025), (0.8, 1.161895), (1.0, math.inf)])
def test_second_moment_cap(budget, expected):
    mask = torch.ones(1, 2, dtype=torch.bool)
    log_ratios, credit = torch.tensor([[0.5, -1.2]], dtype=D), torch.tensor([[1.0, -1.0]], dtype=D)

    bounds = alg.clip_from_budget(log_ratios, credit, mask, budget=budget, floor_low=0.0, floor_high=0.0)

    assert bounds.log_cap == pytest.approx(expected, abs=1e-6)
    assert bounds.eps_low == pytest.approx(1 - math.exp(-expected), abs=1e-6)
    assert bounds.eps_high == pytest.approx(math.exp(expected) - 1, abs=1e-5)


def test_lag_for_ess():
    fit = alg.DriftFit(floor=1e-4, scale=2e-5, exponent=1.5, standard_error=0.0)

    equal([alg.lag_for_ess(fit, ess_target=0.5, num_effective_tokens=500)], 16.052410)


KLS = (0.02, 0.015, 0.005, 0.008, 0.012)


@pytest.mark.parametrize(
    "controller, knobs, expected",
    [
        (alg.kl_exponential, {}, (0.206, 0.21218, 0.210058, 0.207958, 0.214196)),
        (alg.kl_linear, {}, (0.3, 0.375, 0.28125, 0.253125, 0.278438)),
        (alg.kl_pid, {}, (0.20111, 0.201755, 0.201345, 0.201228, 0.201532)),
        (
            alg.kl_horizon,
            {"num_trajectories": 128, "horizon": 10000},
            (0.200512, 0.201025, 0.200511, 0.199997, 0.200509),
        ),
        (alg.kl_log_integral, {"gain": 0.1}, (0.221034, 0.232367, 0.221034, 0.216657, 0.221034)),
    ],
)
def test_kl_controllers(controller, knobs, expected):
    state, coefs = alg.KlState(0.2), []
    for kl in KLS:
        state = controller(state, kl, target=0.01, **knobs)
        coefs.append(state.coef)

    equal(coefs, *expected)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("cosine", (0.2, 0.198769, 0.195106, 0.1, 0.001, 0.001)),
        ("linear", (0.2, 0.19, 0.18, 0.1, 0.001, 0.001)),
        ("exponential", (0.2, 0.172142, 0.148164, 0.044626, 0.009957, 0.009957)),
        ("warmup_cosine", (0.001, 0.1, 0.2, 0.117365, 0.001, 0.001)),
    ],
)
def test_kl_schedules(kind, expected):
    equal([alg.kl_schedule(step, kind=kind) for step in (0, 50, 100, 500, 1000, 2000)], *expected)


def test_two_constraints_with_lagrange_multipliers():
    kl_state = entropy_state = alg.ConstraintState(multiplier=1.0)
    multipliers, losses = [], []
    for kl, entropy in ((0.03, 0.005), (0.0, 0.5), (0.02, 0.02)):
        kl_state = alg.lagrangian_update(kl_state, kl, 0.01, lr=0.01)
        entropy_state = alg.lagrangian_update(entropy_state, entropy, 0.01, sense="min", lr=0.01)
        multipliers += [kl_state.multiplier, entropy_state.multiplier]
        losses.append(
            float(pieces.lagrangian_loss(kl, 0.01, kl_state.multiplier, one_sided=True))
            + float(pieces.lagrangian_loss(entropy, 0.01, entropy_state.multiplier, sense="min", one_sided=True))
        )

    equal(multipliers, 1.0002, 1.00005, 1.0001, 0.99515, 1.0002, 0.99505)
    equal(losses, 0.02500425, 0, 0.010002)


def test_pid_lagrangian():
    state, multipliers = alg.ConstraintState(), []
    for cost in (0.3, 0.5, 0.2):
        state = alg.pid_lagrangian_update(state, cost, 0.25)
        multipliers.append(state.multiplier)

    equal(multipliers, 0.00555, 0.0282, 0)


def test_overlong_penalty():
    lengths = torch.tensor([6, 7, 8, 9, 10, 11])

    equal(alg.overlong_penalty(lengths, max_tokens=10, cache_tokens=4), 0, -0.25, -0.5, -0.75, -1, -1)
