"""Some mistakes of `test_reference_errors` again, looked for in every function that could make them."""

from __future__ import annotations

import pytest
import torch

import streamrl.algorithms as alg

from .rows import random_rows

D = torch.float64
ROW = torch.ones(1, 2, dtype=torch.bool)


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
