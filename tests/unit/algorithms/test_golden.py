"""Golden vectors of the specification, six decimals each, tolerance 1e-6."""

from __future__ import annotations

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
ONES = torch.ones(1, 4, dtype=D)


def equal(result, *expected, at=1e-6):
    numbers = result.flatten().tolist() if isinstance(result, torch.Tensor) else list(result)
    assert numbers == pytest.approx(list(expected), abs=at, rel=0)


def vtrace(**knobs):
    return alg.vtrace(MU, PI, REWARDS, VALUES, MASK, **{"bootstrap_values": END, "gamma": 0.9} | knobs)


def test_gae_lam_095_is_td_lambda_and_on_policy_retrace():
    for result in (
        alg.gae(REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, lam=0.95),
        alg.td_lambda(REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, lam=0.95),
        alg.retrace_v(MU, MU, REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, lam=0.95),
    ):
        equal(result.advantages, 0.822255, 0.774567, 1.2685, 0.7)
        equal(result.targets, 1.022255, 1.174567, 1.3685, 1.0)


def test_gae_lam_1_targets_are_on_policy_vtrace():
    equal(alg.gae(REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9).targets, 1.134, 1.26, 1.4, 1.0)
    on_policy = alg.vtrace(MU, MU, REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9)
    equal(on_policy.targets, 1.134, 1.26, 1.4, 1.0)


def test_minpro_weighs_a_token_and_the_least_likely_one_before_it():
    """Ratios 1.648721, 0.496585, 1, 3.320117; minima before 1, 1.648721, 0.496585, 0.496585."""
    equal(alg.minpro(MU, PI, ONES, MASK).losses, 2.473082, 2.210573, 0.993171, 1.318977)
    equal(alg.minpro(MU, PI, ONES, MASK, cap=1.5).losses, 2.25, 2.210573, 0.993171, 1.2)


def test_vtrace_with_all_bars_1():
    result = vtrace()

    equal(result.targets, 0.744357, 0.827063, 1.4, 1.0)
    equal(result.advantages, 0.544357, 0.86, 1.3, 0.7)
    equal(vtrace(rho_bar_pg=1.0).advantages, 0.544357, 0.427063, 1.3, 0.7)


def test_vtrace_of_a_cut_row_bootstraps_from_the_value_after_the_last_token():
    result = vtrace(bootstrap_values=CUT)

    equal(result.targets, 0.907262, 1.008069, 1.805, 1.45)
    equal(result.advantages, 0.707262, 1.2245, 1.705, 1.15)


def test_vtrace_rho_bar_2_lam_095_follows_the_papers_lambda_rule():
    result = vtrace(rho_bar=2.0, c_bar=1.0, lam=0.95)

    equal(result.targets, 1.009927, 1.038750, 1.967000, 1.700000)
    equal(result.advantages, 0.734875, 1.370300, 1.93, 0.7)
    equal(vtrace(rho_bar=2.0, c_bar=1.0, lam=0.95, rho_bar_pg=2.0).advantages, 1.211604, 0.680471, 1.93, 1.4)


def test_the_other_lambda_rule_is_a_different_number():
    # rlax mixes lam v' + (1 - lam) V'; reproduced here from our targets for contrast.
    result = vtrace(rho_bar=2.0, c_bar=1.0, lam=0.95)
    following = torch.cat([0.95 * result.targets[:, 1:] + 0.05 * VALUES[:, 1:], torch.zeros(1, 1, dtype=D)], dim=1)
    mixed = REWARDS + 0.9 * following - VALUES

    equal(mixed, 0.706131, 1.286285, 1.867, 0.7)
    assert (mixed - result.advantages).abs().max() > 0.02


def test_vtrace_trace_temperature_and_leak():
    equal(vtrace(trace_temperature=4.0).targets, 1.105401, 1.228223, 1.4, 1.0)
    leaky = vtrace(leak=0.5)
    equal(leaky.targets, 1.310244, 1.153694, 2.130837, 1.812041)
    equal(leaky.advantages, 0.838325, 1.517753, 2.030837, 0.7)


def test_retrace_v():
    result = alg.retrace_v(MU, PI, REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, lam=0.95)
    equal(result.targets, 0.688866, 1.174567, 1.368500, 1.0)
    equal(result.advantages, 0.488866, 0.774567, 1.2685, 0.7)
    state = alg.retrace_v(MU, PI, REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, target_rho_bar=1.0)
    equal(state.targets, 0.744357, 0.827063, 1.4, 1.0)


@pytest.mark.parametrize(
    "policy, lam, expected",
    [
        (PI, 1.0, (0.604469, 0.747, 1.13, 1.0)),
        (PI, 0.95, (0.571764, 0.698760, 1.112, 1.0)),
        (MU, 1.0, (0.8523, 0.747, 1.13, 1.0)),
    ],
)
def test_retrace_q(policy, lam, expected):
    q = torch.tensor([[0.3, 0.2, 0.4, 0.6]], dtype=D)

    result = alg.retrace_q(MU, policy, REWARDS, q, VALUES, MASK, bootstrap_values=END, gamma=0.9, lam=lam)

    equal(result.targets, *expected)


@pytest.mark.parametrize(
    "n, bootstrap, expected",
    [
        (2, True, (0.081, 0.693, 1.4, 1.0)),
        (4, True, (1.134, 1.26, 1.4, 1.0)),
        (99, True, (1.134, 1.26, 1.4, 1.0)),
        (2, False, (0, 0.45, 1.4, 1.0)),
    ],
)
def test_n_step(n, bootstrap, expected):
    result = alg.n_step(REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, n=n, bootstrap=bootstrap)

    equal(result.targets, *expected)


def test_clipped_is():
    result = alg.clipped_is(MU, PI, REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, eps=0.2)

    equal(result.advantages, 1.1608, 0.608, 1.3, 0.9)


@pytest.mark.parametrize(
    "knobs, expected",
    [
        ({}, (0.372439, 0.75, 0.75, 0.75)),
        ({"rho_bar_pg": 1.0}, (0.372439, 0.372439, 0.75, 0.75)),
        ({"rho_bar": 2.0, "c_bar": 1.0}, (0.744878, 1.5, 1.5, 0.75)),
    ],
)
def test_vtrace_critic_free(knobs, expected):
    one, quarter = torch.ones(1, dtype=D), torch.full((1,), 0.25, dtype=D)

    equal(alg.vtrace_critic_free(MU, PI, one, quarter, MASK, **knobs), *expected)


@pytest.mark.parametrize(
    "gamma, trace, targets, advantages",
    [
        (0.9, "product", (1.141540, 1.5), (1.15, 1.15, 1.4, 1.4)),
        (1.0, "product", (1.264350, 1.5), (1.3, 1.3, 1.4, 1.4)),
        (0.9, "geometric", (1.250035, 1.5), (1.15, 1.15, 1.4, 1.4)),
    ],
)
def test_vtrace_segments(gamma, trace, targets, advantages):
    segments = torch.tensor([[0, 0, 1, 1]])

    result = alg.vtrace_segments(
        MU, PI, REWARDS, VALUES, MASK, segments, bootstrap_values=END, gamma=gamma, trace=trace
    )

    assert result.starts.tolist() == [[True, False, True, False]]
    equal(result.targets[result.starts], *targets)
    equal(result.advantages, *advantages)


def test_the_wrong_terminal_value_does_not_appear():
    wrong = torch.tensor([[0.8421, 0.935667, 1.643, 1.27]], dtype=D)
    standing_in = vtrace(bootstrap_values=VALUES[:, -1])

    equal(standing_in.targets, *wrong[0].tolist())  # this is how the fault comes about
    assert (vtrace().targets - wrong).abs().min() > 0.09


def test_whitened_gae_advantages():
    raw = alg.gae(REWARDS, VALUES, MASK, bootstrap_values=END, gamma=0.9, lam=0.95).advantages

    equal(alg.whiten(raw, MASK), -0.269373, -0.455342, 1.470847, -0.746131)


def test_row_statistics_and_sample_size():
    stats = alg.sequence_stats(ELL, MASK)

    equal([float(stats.log_sum), float(stats.log_mean), math.exp(stats.log_mean)], 1, 0.25, 1.284025)
    equal([float(stats.k2_sum), float(stats.k3_mean), 2 * float(stats.k2_sum) / 4], 1.09, 0.366356, 0.545)
    report = pieces.ess_report(ELL, MASK)
    equal([float(report.token), float(report.mean_token_weight)], 0.697250, 1.616356)
    equal(alg.trace_length(ELL, MASK), 1.744878)


def test_token_weights():
    equal(alg.tis_weights(ELL, MASK, cap=2.0), 1.648721, 0.496585, 1, 2)
    equal(pieces.mis_weights(ELL, MASK, low=0.5, high=5.0), 1.648721, 0, 1, 3.320117)
    equal(pieces.mis_weights(ELL, MASK, low=0.5, high=2.0), 1.648721, 0, 1, 0)
    short = torch.tensor([[-1, 0, 0.5, 1]], dtype=D)
    equal(alg.tis_weights(short, MASK, cap=2.0), 0.367879, 1, 1.648721, 2)


def test_ppo_clip_losses():
    equal(alg.ppo_clip(MU, PI, ONES, MASK).losses, -1.2, -0.496585, -1, -1.2)
    equal(alg.ppo_clip(MU, PI, -ONES, MASK).losses, 1.648721, 0.8, 1, 3.320117)


def test_clip_higher_and_dual_clip():
    mask = torch.ones(1, 2, dtype=torch.bool)
    mu, up = torch.full((1, 2), -3.0, dtype=D), torch.tensor([[0.3, 0.2]], dtype=D)
    equal(alg.ppo_clip(mu, mu + up, torch.ones_like(mu), mask, eps_high=0.28).losses, -1.28, -1.221403)
    one = torch.ones(1, 1, dtype=torch.bool)
    start = torch.full((1, 1), -3.0, dtype=D)
    equal(alg.ppo_clip(start, start + 2, -torch.ones_like(start), one, dual_clip=3.0).losses, 3)


def test_sapo_and_gmpo():
    equal(alg.sapo(MU, PI, ONES, MASK).losses, -2.626889, -1.506954, -2, -3.642118)
    equal(alg.sapo(MU, PI, -ONES, MASK).losses, 2.529512, 1.412750, 1.904762, 3.503012)
    equal(alg.gmpo(MU, PI, ONES, MASK).losses, *[-1.025315] * 4)
    equal(alg.gmpo(MU, PI, -ONES, MASK).losses, *[1.384031] * 4)


@pytest.mark.parametrize(
    "advantage, expected",
    [(1.0, (1.197706, 1, 0.388227, 0.042645)), (-1.0, (0.490141, 1, 1.224530, 0.646253))],
)
def test_vespo_weight_at_four_row_sums(advantage, expected):
    mask = torch.ones(4, 1, dtype=torch.bool)
    policy = torch.full((4, 1), -1.0, dtype=D)
    behavior = policy - torch.tensor([[-0.5], [0.0], [0.5], [1.0]], dtype=D)

    # At log pi = -1 the loss -phi A log pi is phi A.
    losses = alg.vespo(behavior, policy, torch.full_like(policy, advantage), mask).losses

    equal(advantage * losses, *expected)


def test_group_advantages_of_binary_scores():
    scores, ids = torch.tensor([1, 0, 0, 1], dtype=D), torch.zeros(4, dtype=torch.int64)

    equal(pieces.dr_grpo_advantages(scores, ids), 0.5, -0.5, -0.5, 0.5)
    equal(alg.grpo_advantages(scores, ids, eps=0.0), 0.866025, -0.866025, -0.866025, 0.866025)
    equal(pieces.rloo_advantages(scores, ids), 0.666667, -0.666667, -0.666667, 0.666667)


SCORES, IDS = torch.tensor([1, 0, 0.5, 0], dtype=D), torch.zeros(4, dtype=torch.int64)
WEIGHTS = torch.tensor([1, 0.5, 2, 0.25], dtype=D)


def test_group_advantages_of_graded_scores():
    equal(alg.grpo_advantages(SCORES, IDS), 1.305580, -0.783348, 0.261116, -0.783348)
    equal(alg.grpo_advantages(SCORES, IDS, eps=0.0), 1.305582, -0.783349, 0.261116, -0.783349)
    equal(pieces.rloo_advantages(SCORES, IDS), 0.833333, -0.5, 0.166667, -0.5)
    equal(pieces.maxrl_advantages(SCORES, IDS, eps=0.0), 1.666667, -1, 0.333333, -1)


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


def test_opob():
    norms = torch.tensor([1, 2, 1, 4], dtype=D)

    equal(alg.opob(SCORES, IDS, WEIGHTS, norms, leave_one_out=False), *[0.521739] * 4)
    equal(alg.opob(SCORES, IDS, WEIGHTS, norms), 0.421053, 0.571429, 0.571429, 0.545455)


@pytest.mark.parametrize("x, expected", [(0.5, (0.5, 0.125, 0.106531)), (-0.5, (-0.5, 0.125, 0.148721))])
def test_kl_estimates(x, expected):
    one = torch.ones(1, 1, dtype=torch.bool)
    reference = torch.full((1, 1), -2.0, dtype=D)

    equal([float(alg.kl_estimate(reference + x, reference, one, kind=k)) for k in ("k1", "k2", "k3")], *expected)


TWO_ROWS = torch.tensor([[True, True, True], [True, False, False]])


def two_row_losses():
    log_u = torch.tensor([[0, 0.3, -0.3], [0.4, 0, 0]], dtype=D)
    credit = torch.tensor([[1.0, 1, 1], [-1, 0, 0]], dtype=D)
    mu = torch.full((2, 3), -3.0, dtype=D)
    return alg.ppo_clip(mu, mu + log_u, credit, TWO_ROWS).losses


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", -0.362248),
        ("seq-mean-token-mean", 0.255776),
        ("seq-mean-token-sum", -0.724497),
        ("seq-mean-token-sum-norm", -0.181124),
    ],
)
def test_aggregation_of_two_rows(mode, expected):
    losses = two_row_losses()

    equal(losses[TWO_ROWS], -1, -1.2, -0.740818, 1.491825)
    equal([float(alg.aggregate(losses, TWO_ROWS, mode=mode, max_tokens=4))], expected)


def test_sample_size_of_sequence_weights():
    weights = torch.tensor([1, 2, 0.5, 1], dtype=D)

    equal([float(pieces.effective_sample_size(weights))], 0.81)
    equal([float(pieces.effective_sample_size(weights.clamp(max=1.5)))], 0.888889)


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


def test_hypervolume_and_tchebycheff():
    front = torch.tensor([[1, 3], [2, 2], [3, 1]], dtype=D)
    equal([alg.hypervolume(front, torch.zeros(2, dtype=D))], 6)
    point, ideal = torch.tensor([[0.6, 0.3]], dtype=D), torch.tensor([0.9, 0.5], dtype=D)
    equal(alg.tchebycheff(point, torch.tensor([1, 0.5], dtype=D), ideal), -0.3)
