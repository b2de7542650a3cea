"""Mistakes known from reference implementations and their documentation; E-numbers as in the specification.

Each test would fail if our function made that mistake. E21, E24 (splits) and E25 also have tests beside their
functions.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces

from .rows import random_rows

D = torch.float64
ROW = torch.ones(1, 2, dtype=torch.bool)


def policy_gradient(call, policy):
    leaf = policy.clone().requires_grad_()
    call(leaf).sum().backward()
    return leaf.grad


def test_e1_no_function_takes_a_recomputed_old_log_prob_as_denominator():
    for name, function in {**alg.SURROGATES, **alg.ESTIMATORS}.items():
        parameters = list(inspect.signature(function).parameters)
        assert not any(p.startswith("old_log") for p in parameters), name
        if "policy_logprobs" in parameters and name not in ("reinforce", "ppo_clip"):
            assert parameters[0] == "behavior_logprobs", name
    with pytest.raises(ValueError, match="recorded behavior"):
        alg.check_pairing("group", "tis", anchor="recomputed")


def test_e2_a_decoupled_weight_with_a_ratio_on_mu_is_refused_because_it_counts_twice():
    with pytest.raises(ValueError, match="more than once"):
        alg.check_pairing("group", "ppo_clip", anchor="behavior", correction="decoupled_token_is", max_lag=4)

    # What it would have computed: at pi_prox = pi the on-policy gradient times rho squared instead of rho.
    rows = random_rows(0, drift=0.1)
    weights = alg.tis_weights(rows.policy - rows.behavior, rows.mask, cap=99.0)
    double = policy_gradient(
        lambda p: weights * alg.ppo_clip(rows.behavior, p, rows.advantages, rows.mask, eps_low=1, eps_high=99).losses,
        rows.policy,
    )
    ratio = (rows.policy - rows.behavior).exp()
    expected = torch.where(rows.mask, -rows.advantages * ratio.square(), 0.0)
    assert torch.allclose(double, expected)


def test_e3_interpolated_proximal_and_truncated_weights_are_detached():
    rows = random_rows(1)
    policy = rows.policy.clone().requires_grad_()

    proximal = alg.loglinear_proximal(rows.behavior, policy, rows.lags, rows.mask)
    ratios = alg.log_ratios(rows.behavior, policy, rows.mask)

    assert not proximal.requires_grad and not ratios.requires_grad
    assert not alg.tis_weights(policy - rows.behavior, rows.mask).requires_grad
    # Passed undetached by hand, a weight or a proximal policy still takes no gradient.
    inside = policy_gradient(
        lambda p: alg.reinforce(p, rows.advantages, rows.mask, weights=(p - rows.behavior).exp()).losses, rows.policy
    )
    ratio = (rows.policy - rows.behavior).exp()
    assert torch.allclose(inside, torch.where(rows.mask, -ratio * rows.advantages, 0.0))
    grad = policy_gradient(
        lambda p: alg.decoupled_ppo(rows.behavior, p, p, rows.advantages, rows.mask, cap=99.0).losses, rows.policy
    )
    assert torch.allclose(grad, torch.where(rows.mask, -ratio * rows.advantages, 0.0))


def test_e4_masking_does_not_shrink_the_denominator():
    mask, keep = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[True, False, False, False]])

    assert float(alg.aggregate(torch.ones(1, 4), mask, keep=keep)) == 0.25
    assert float(alg.aggregate(torch.ones(1, 4), mask, mode="seq-mean-token-mean", keep=keep)) == 0.25


def expected_gradient(loss_of, seed=0):
    """E_mu of a KL loss over six actions, with the true reverse-KL gradient."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref, mu = (torch.randn(6, generator=generator, dtype=D) for _ in range(3))
    ref, mu = ref.log_softmax(0)[None], mu.log_softmax(0)[None]
    mask = torch.ones(1, 6, dtype=torch.bool)
    grad = policy_gradient(lambda z: mu.exp() * loss_of(z.log_softmax(0)[None], ref, mu, mask), logits)
    truth = policy_gradient(lambda z: z.softmax(0) * (z.log_softmax(0) - ref[0]), logits)
    return grad, truth


def test_e5_k3_under_mu_needs_the_differentiable_ratio():
    plain, truth = expected_gradient(lambda p, r, mu, m: alg.kl_loss(mu, p, r, m, kind="k3"))
    constant, _ = expected_gradient(lambda p, r, mu, m: (p - mu).exp().detach() * alg.kl_estimate(p, r, m, kind="k3"))
    right, _ = expected_gradient(lambda p, r, mu, m: alg.kl_loss(mu, p, r, m, kind="k3_is"))
    default, _ = expected_gradient(lambda p, r, mu, m: alg.kl_loss(mu, p, r, m, cap=1e9))

    assert (plain - truth).abs().max() > 1e-2
    assert (constant - truth).abs().max() > 1e-2
    assert (right - truth).abs().max() < 1e-12
    assert (default - truth).abs().max() < 1e-12


def test_e6_float64_is_not_lowered_by_python_thresholds():
    rows = random_rows(2)
    exact = alg.vtrace(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap,
        gamma=0.9, rho_bar=1.3, c_bar=1.1, lam=0.95,
    )  # fmt: skip
    rounded = alg.vtrace(
        *(t.float().double() for t in (rows.behavior, rows.policy, rows.rewards, rows.values)), rows.mask,
        bootstrap_values=rows.bootstrap.float().double(), gamma=0.9, rho_bar=1.3, c_bar=1.1, lam=0.95,
    )  # fmt: skip

    assert exact.targets.dtype == D
    gap = (exact.targets - rounded.targets).abs().max()
    assert 1e-10 < gap < 1e-4  # float32 rounding would be visible, so the computation above is finer than it


def test_e7_zeroing_is_not_clamping():
    one = torch.ones(1, 1, dtype=torch.bool)
    behavior, policy = torch.full((1, 1), -5.0, dtype=D), torch.full((1, 1), -1.0, dtype=D)
    credit = torch.ones_like(policy)

    clamped = policy_gradient(lambda p: alg.tis(behavior, p, credit, one, cap=5.0).losses, policy)
    zeroed = policy_gradient(lambda p: alg.mis(behavior, p, credit, one, low=0.5, high=5.0).losses, policy)

    assert clamped.item() == -5.0
    assert zeroed.item() == 0.0


def test_e8_topr_uses_the_trajectory_ratio():
    mask = torch.ones(1, 2, dtype=torch.bool)
    behavior = torch.full((1, 2), -2.0, dtype=D)
    policy = behavior + torch.tensor([[-3.0, 1.0]], dtype=D)  # token ratios e^-3 and e, trajectory ratio e^-2

    grad = policy_gradient(lambda p: alg.topr(behavior, p, -torch.ones_like(p), mask).losses, policy)

    assert grad.tolist() == [[pytest.approx(math.exp(-2))] * 2]


def test_e9_m2po_counts_harmful_tokens_only():
    mask = torch.ones(1, 4, dtype=torch.bool)
    log_ratios = torch.tensor([[0.1, -3.0, 3.0, -0.1]], dtype=D)
    credit = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=D)  # the large ratios correct themselves

    bounds = alg.clip_from_budget(log_ratios, credit, mask, budget=0.04)

    assert bounds.log_cap == math.inf


def test_e11_dppo_masks_by_probability_difference_not_by_capping_the_ratio():
    one = torch.ones(1, 1, dtype=torch.bool)
    rare_mu, rare_pi = torch.full((1, 1), math.log(1e-4), dtype=D), torch.full((1, 1), math.log(1e-3), dtype=D)
    big_mu, big_pi = torch.full((1, 1), math.log(0.5), dtype=D), torch.full((1, 1), math.log(0.75), dtype=D)
    credit = torch.ones_like(rare_mu)

    rare = policy_gradient(lambda p: alg.dppo_tv(rare_mu, p, credit, one, cap=None).losses, rare_pi)
    big = policy_gradient(lambda p: alg.dppo_tv(big_mu, p, credit, one, cap=None).losses, big_pi)

    assert rare.item() == pytest.approx(-10.0)  # a ratio of 10 on a rare token is kept, uncapped
    assert big.item() == 0.0  # a ratio of 1.5 that moves 0.25 of probability is not


def test_e12_the_clamp_hides_infinities_but_never_nan():
    mask = torch.ones(1, 3, dtype=torch.bool)
    behavior = torch.tensor([[-1.0, float("-inf"), float("nan")]])

    log_ratios = alg.log_ratios(behavior, torch.full((1, 3), -1.0), mask)

    # Hence the batch is assembled from finite behavior log-probs only: +20 here would look like an ordinary token.
    assert log_ratios[0, :2].tolist() == [0.0, 20.0]
    assert log_ratios[0, 2].isnan()
    assert "rejected" in inspect.getdoc(alg.log_ratios)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_e13_the_ratio_of_fresh_data_is_one_only_at_the_sampling_temperature(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=D)
    tokens, mask = torch.randint(0, 5, (2, 3), generator=generator), torch.ones(2, 3, dtype=torch.bool)
    recorded = (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)

    right = alg.log_ratios(recorded, pieces.token_logprobs(logits, tokens, temperature=temperature), mask)
    wrong = alg.log_ratios(recorded, pieces.token_logprobs(logits, tokens), mask)

    assert right.abs().max() < 1e-12
    assert (wrong.abs().max() < 1e-12) == (temperature == 1.0)


def test_e15_a_group_over_too_many_versions_is_split_so_that_it_has_no_common_std():
    model = alg.DriftModel((0.0, 1.0, 2.0), (1.0,) * 3, (0.0, 0.01, 0.02), (0.0,) * 3)
    budget = alg.spread_budget(model, m2_target=0.05)

    split = alg.split_by_lag(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 1, 2, 2]), budget=budget).tolist()

    assert split[0] != split[1] and split[2] == split[3]


def test_e16_ess_weights_are_not_clamped_from_below():
    # One tiny weight among ones: clamping both ends (to [1/2, 2] here) would report almost 1.
    weights = torch.tensor([1.0, 1.0, 1e-6, 1e-6])

    assert float(pieces.effective_sample_size(weights)) == pytest.approx(0.5, rel=1e-4)
    report = pieces.ess_report(weights.log()[:, None], torch.ones(4, 1, dtype=torch.bool), cap=2.0)
    assert float(report.sequence_clipped) == pytest.approx(0.5, rel=1e-4)


def test_e17_no_weight_is_taken_against_the_reference():
    for name, function in {**alg.SURROGATES, **alg.ESTIMATORS}.items():
        assert "reference_logprobs" not in inspect.signature(function).parameters, name
    rows = random_rows(3)
    one = alg.kl_loss(rows.policy, rows.policy, rows.reference, rows.mask)
    assert torch.allclose(one, alg.kl_estimate(rows.policy, rows.reference, rows.mask, kind="k2"))  # rho is pi/mu = 1


def test_e19_retrace_does_not_cut_a_tokens_own_error():
    one = torch.ones(1, 1, dtype=torch.bool)
    behavior, policy = torch.zeros(1, 1, dtype=D), torch.full((1, 1), -3.0, dtype=D)

    def run(function):
        return function(
            behavior,
            policy,
            torch.ones(1, 1, dtype=D),
            torch.zeros(1, 1, dtype=D),
            one,
            bootstrap_values=torch.zeros(1),
        ).targets.item()

    assert run(alg.retrace_v) == 1.0
    assert run(alg.vtrace) == pytest.approx(math.exp(-3))  # whereas V-trace does


def test_e20_whitening_is_over_the_batch_so_that_group_signal_survives():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    constant = alg.broadcast_rows(torch.tensor([1.0, -1.0]), mask)

    white = alg.whiten(constant, mask)

    assert white[0, 0] > 0.3 and white[1, 0] < -0.9
    assert not white.isnan().any()


def test_e21_constraints_have_gradients_and_objectives_are_no_losses():
    value = torch.tensor(0.5, requires_grad=True)
    (alg.constraint_penalty(value, 0.1) + pieces.lagrangian_loss(value, 0.1, 2.0)).backward()
    assert value.grad.item() == pytest.approx(20 * 0.4 + 2.0)

    scores = torch.rand(4, 2, requires_grad=True)
    for result in (
        alg.weighted_sum(scores, torch.ones(2)),
        alg.tchebycheff(scores, torch.ones(2), torch.ones(2)),
        alg.hypervolume_contributions(scores, torch.zeros(2)),
    ):
        assert not result.requires_grad


def test_e24_a_token_mean_per_micro_batch_would_be_another_number():
    losses, mask = torch.tensor([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]]), torch.tensor([[True] * 3, [True, False, False]])
    weights = alg.aggregation_weights(mask.sum(1), mode="token-mean")

    shared = sum(float(alg.aggregate(losses[i], mask[i], row_weights=weights[i])) for i in ([0], [1]))
    per_part = sum(float(alg.aggregate(losses[i], mask[i])) for i in ([0], [1])) / 2

    assert shared == pytest.approx(float(alg.aggregate(losses, mask))) == pytest.approx(7 / 4)
    assert per_part == pytest.approx(2.5)


def test_e25_the_kl_term_has_its_own_weight():
    rows = random_rows(5)
    ratio = (rows.policy - rows.behavior).exp()
    k2 = alg.kl_estimate(rows.policy, rows.reference, rows.mask, kind="k2")

    loss = alg.kl_loss(rows.behavior, rows.policy, rows.reference, rows.mask, cap=1.2)

    assert torch.allclose(loss, ratio.clamp(max=1.2) * k2)
    assert "weights" not in inspect.signature(alg.kl_loss).parameters


def test_e26_the_target_for_a_state_critic_differs_from_the_one_for_q():
    rows = random_rows(6)

    def targets(**knobs):
        return alg.retrace_v(
            rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, **knobs
        ).targets

    assert (targets() - targets(target_rho_bar=1.0)).abs().max() > 1e-2


# Some of these mistakes again, looked for in every function that could make them.


def row(*numbers):
    return torch.tensor([numbers], dtype=D)


def ends_without_a_value(values, end, **knobs):
    """Targets of two tokens without rewards, by every estimator that has values; the policies are equal."""
    zeros, segments = torch.zeros_like(values), torch.tensor([[0, 1]])
    end = torch.tensor([end], dtype=D)
    on_policy = (zeros - 1, zeros - 1, zeros, values)
    return {
        "vtrace": alg.vtrace(*on_policy, ROW, bootstrap_values=end, **knobs),
        "vtrace_segments": alg.vtrace_segments(*on_policy, ROW, segments, bootstrap_values=end, **knobs),
        "retrace_v": alg.retrace_v(*on_policy, ROW, bootstrap_values=end, **knobs),
        "retrace_q": alg.retrace_q(*on_policy, values, ROW, bootstrap_values=end, **knobs),
        "gae": alg.gae(zeros, values, ROW, bootstrap_values=end, **knobs),
        "td_lambda": alg.td_lambda(zeros, values, ROW, bootstrap_values=end, **knobs),
        "n_step": alg.n_step(zeros, values, ROW, bootstrap_values=end, n=2, **knobs),
        "clipped_is": alg.clipped_is(*on_policy, ROW, bootstrap_values=end, **knobs),
    }


VALUED = sorted(set(alg.ESTIMATORS) - {"group", "reinforce_pp", "vtrace_critic_free"})


@pytest.mark.parametrize("name", VALUED)
def test_e6_gamma_is_a_double_in_every_estimator(name):
    """0.93 is no float32 number: 0.93f squared differs from 0.8649 in the ninth digit."""
    targets = ends_without_a_value(row(0.0, 0.0), 1.0, gamma=0.93)[name].targets

    assert targets[0, 0].item() == pytest.approx(0.93 * 0.93, abs=1e-15)


@pytest.mark.parametrize(
    "call",
    [
        lambda mu, pi, one: alg.vtrace(
            mu, pi, row(0, 1), row(0, 0), ROW, bootstrap_values=row(0)[0], rho_bar=1.3, c_bar=1.0
        ).targets[0, 1],
        lambda mu, pi, one: alg.vtrace_critic_free(
            mu, pi, row(1)[0], row(0)[0], ROW, rho_bar=1.3, c_bar=1.0, rho_bar_pg=1.3
        )[0, 1],
        lambda mu, pi, one: alg.tis_weights(pi - mu, ROW, cap=1.3)[0, 1],
        lambda mu, pi, one: alg.seq_tis_weights(pi - mu, ROW, cap=1.3)[0, 1],
        lambda mu, pi, one: -alg.ppo_clip(mu, pi, one, ROW, eps_high=0.3).losses[0, 1],
        lambda mu, pi, one: alg.ppo_clip(mu, pi, -one, ROW, dual_clip=1.3).losses[0, 1],
        lambda mu, pi, one: alg.tis(mu, pi, one, ROW, cap=1.3).losses[0, 1],  # log pi = -1
        lambda mu, pi, one: alg.seq_tis(mu, pi, one, ROW, cap=1.3).losses[0, 1],
    ],
)
def test_e6_bounds_are_doubles_where_they_act(call):
    mu, pi, one = row(-3.0, -3.0), row(-1.0, -1.0), row(1.0, 1.0)

    assert call(mu, pi, one).item() == pytest.approx(1.3, abs=1e-15)


@pytest.mark.parametrize("name", VALUED)
def test_e18_no_estimator_bootstraps_from_the_last_value_instead_of_the_one_after_it(name):
    terminated = ends_without_a_value(row(0.0, 7.0), 0.0)[name].targets
    cut = ends_without_a_value(row(0.0, 7.0), 2.0)[name].targets

    assert terminated[0, 1].item() == 0.0
    assert cut[0, 1].item() == 2.0


def test_e19_retrace_with_real_q_does_not_cut_a_tokens_own_error():
    one = torch.ones(1, 1, dtype=torch.bool)

    result = alg.retrace_q(row(0.0), row(-3.0), row(1.0), row(0.0), row(0.0), one, bootstrap_values=torch.zeros(1))

    assert result.targets.item() == 1.0


@pytest.mark.parametrize("name", VALUED)
def test_e22_the_first_turn_learns_from_the_last_reward_across_observations(name):
    mask = torch.tensor([[True, False, False, True]])
    logprobs, values, rewards = torch.full((1, 4), -1.0), torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    policy = (logprobs, logprobs, rewards, values)
    arguments = {
        "vtrace_segments": (*policy, mask, torch.tensor([[0, 0, 0, 1]])),
        "retrace_q": (*policy, values, mask),
        **dict.fromkeys(("gae", "td_lambda", "n_step"), (rewards, values, mask)),
    }.get(name, (*policy, mask))

    result = alg.ESTIMATORS[name](*arguments, bootstrap_values=torch.zeros(1))

    assert result.advantages.tolist() == [[1.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("name", sorted(set(alg.SURROGATES) - {"reinforce"}))
def test_e23_every_surrogate_with_a_ratio_reads_the_recorded_log_probs(name):
    rows = random_rows(4, drift=0.2)
    knobs = {"dppo_kl": {"bound_low": 0.05, "bound_high": 0.05}}.get(name, {})
    between = (rows.proximal,) if name == "decoupled_ppo" else ()

    near, far = (
        alg.SURROGATES[name](rows.behavior - shift, *between, rows.policy, rows.advantages, rows.mask, **knobs).losses
        for shift in (0.0, 0.1)
    )

    assert not torch.allclose(near, far)
