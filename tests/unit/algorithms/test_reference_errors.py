"""Mistakes known from reference implementations, looked for in every function that could make them.

E-numbers as in the specification; those that one formula alone could hold fail against its transcription.
"""

import inspect

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from .rows import random_rows

D = torch.float64
ROW = torch.ones(1, 2, dtype=torch.bool)
VALUED = sorted(name for name, entry in alg.ESTIMATOR_ENTRIES.items() if "values" in entry.inputs or entry.of_actions)


def test_e1_e17_the_recorded_log_prob_is_the_only_denominator():
    for name, function in {**alg.SURROGATES, **alg.ESTIMATORS}.items():
        parameters = list(inspect.signature(function).parameters)
        assert not any(p.startswith(("old_log", "reference")) for p in parameters), name
        if "policy_logprobs" in parameters and name not in ("reinforce", "ppo_clip"):
            assert parameters[0] == "behavior_logprobs", name
    assert "weights" not in inspect.signature(alg.kl_loss).parameters, "E25: the KL term has its own weight"


def row(*numbers):
    return torch.tensor([numbers], dtype=D)


def estimate(name, values, mask, end, *, rewards=None, **knobs):
    """One row by an estimator with values; the policies are equal, and a segment ends at the last token."""
    rewards = torch.zeros_like(values) if rewards is None else rewards
    logprobs, segments = torch.full_like(values, -1.0), torch.zeros_like(values, dtype=torch.int64)
    segments[:, -1] = 1
    policy = (logprobs, logprobs, rewards, values)
    arguments = {
        "vtrace_segments": (*policy, mask, segments),
        "retrace_q": (*policy, values, mask),
        **dict.fromkeys(("gae", "td_lambda", "n_step"), (rewards, values, mask)),
    }.get(name, (*policy, mask))
    return alg.ESTIMATORS[name](*arguments, bootstrap_values=torch.tensor([end], dtype=D), **knobs)


@each("name", VALUED)
def test_e6_gamma_is_a_double_in_every_estimator(name):
    """0.93 is no float32 number: 0.93f squared differs from 0.8649 in the ninth digit."""
    knobs = {"n": 2} if name == "n_step" else {}
    targets = estimate(name, row(0.0, 0.0), ROW, 1.0, gamma=0.93, **knobs).targets

    assert targets[0, 0].item() == pytest.approx(0.93 * 0.93, abs=1e-15)


BOUNDED = (
    lambda mu, pi, one: alg.vtrace(
        mu, pi, row(0, 1), row(0, 0), ROW, bootstrap_values=row(0)[0], rho_bar=1.3, c_bar=1.0
    ).targets,
    lambda mu, pi, one: alg.vtrace_critic_free(mu, pi, row(1)[0], row(0)[0], ROW, rho_bar=1.3, rho_bar_pg=1.3),
    lambda mu, pi, one: alg.tis_weights(pi - mu, ROW, cap=1.3),
    lambda mu, pi, one: alg.seq_tis_weights(pi - mu, ROW, cap=1.3),
    lambda mu, pi, one: -alg.ppo_clip(mu, pi, one, ROW, eps_high=0.3).losses,
    lambda mu, pi, one: alg.ppo_clip(mu, pi, -one, ROW, dual_clip=1.3).losses,
    lambda mu, pi, one: alg.tis(mu, pi, one, ROW, cap=1.3).losses,  # log pi = -1
    lambda mu, pi, one: alg.seq_tis(mu, pi, one, ROW, cap=1.3).losses,
)


@each("call", BOUNDED)
def test_e6_bounds_are_doubles_where_they_act(call):
    mu, pi, one = row(-3.0, -3.0), row(-1.0, -1.0), row(1.0, 1.0)

    assert call(mu, pi, one)[0, 1].item() == pytest.approx(1.3, abs=1e-15)


@each("name", VALUED)
def test_e18_no_estimator_bootstraps_from_the_last_value_instead_of_the_one_after_it(name):
    ends = [estimate(name, row(0.0, 7.0), ROW, end).targets[0, 1].item() for end in (0.0, 2.0)]

    assert ends == [0.0, 2.0]


@each("name", VALUED)
def test_e22_the_first_turn_learns_from_the_last_reward_across_observations(name):
    mask = torch.tensor([[True, False, False, True]])

    result = estimate(name, torch.zeros(1, 4), mask, 0.0, rewards=torch.tensor([[0.0, 0.0, 0.0, 1.0]]))

    assert result.advantages.tolist() == [[1.0, 0.0, 0.0, 1.0]]


@each("name", sorted(set(alg.SURROGATES) - {"reinforce"}))
def test_e23_every_surrogate_with_a_ratio_reads_the_recorded_log_probs(name):
    rows = random_rows(4, drift=0.2)
    knobs = {"dppo_kl": {"bound_low": 0.05, "bound_high": 0.05}, "flash_reinforce": {"delta": 1.0}}.get(name, {})
    between = (rows.proximal,) if name == "decoupled_ppo" else ()

    near, far = (
        alg.SURROGATES[name](rows.behavior - shift, *between, rows.policy, rows.advantages, rows.mask, **knobs).losses
        for shift in (0.0, 0.1)
    )

    assert not torch.allclose(near, far)
