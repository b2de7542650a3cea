"""V-trace (arXiv:1802.01561) against rlax, RLlib (both of its versions) and torchrl.

All three fix something that we leave free, so each checks another part: rlax and RLlib fix c_bar = 1, RLlib and torchrl
know no lambda, only torchrl has its own c_bar. Their advantages carry the own ratio: ours with `rho_bar_pg`.
"""

import numpy
import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches, row_by_row, shifted

FIELDS = ("policy", "behavior", "rewards", "values", "gamma")


def ours(rows, **knobs):
    knobs = {"gamma": rows.gamma, **knobs}
    return alg.vtrace(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, **knobs
    )


@pytest.mark.parametrize("lam", [1.0, 0.9])
@pytest.mark.parametrize("rho_bar", [1.0, 2.5])
def test_targets_agree_with_rlax(rlax, lam, rho_bar):
    """It returns errors (targets minus values) and takes ratios, not their logs."""

    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        ratios = numpy.exp(policy - behavior)
        out = rlax.vtrace_td_error_and_advantage(
            values, shifted(values, bootstrap), rewards, gamma, ratios, lam, rho_bar, 1.0
        )
        return (out.errors + values,)

    for rows in batches():
        agree(ours(rows, lam=lam, rho_bar=rho_bar).targets, *row_by_row(rows, oracle, *FIELDS))


def test_advantages_agree_with_rlax_at_lambda_one_with_and_without_own_ratio(rlax):
    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        ratios = numpy.exp(policy - behavior)
        out = rlax.vtrace_td_error_and_advantage(
            values, shifted(values, bootstrap), rewards, gamma, ratios, 1.0, 2.0, 1.5
        )
        return out.pg_advantage, out.q_estimate - values

    for rows in batches():
        published, without = row_by_row(rows, oracle, *FIELDS)
        agree(ours(rows, rho_bar=2.0, rho_bar_pg=1.5).advantages, published)
        agree(ours(rows, rho_bar=2.0).advantages, without)


def test_below_lambda_one_rlax_bootstraps_from_a_mixture_and_we_from_the_target_as_in_the_paper(rlax):
    """The whole difference is gamma (1 - lambda) (v_{t+1} - V_{t+1}), 0 at the last token."""
    lam = 0.8

    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        ratios = numpy.exp(policy - behavior)
        out = rlax.vtrace_td_error_and_advantage(values, shifted(values, bootstrap), rewards, gamma, ratios, lam)
        mixed_away = (1 - lam) * gamma * shifted(numpy.array(out.errors), 0.0)
        return out.q_estimate - values, mixed_away

    for rows in batches():
        mixture, mixed_away = row_by_row(rows, oracle, *FIELDS)
        assert mixed_away.abs().max() > 1e-2
        agree(ours(rows, lam=lam).advantages, mixture + mixed_away)


def test_a_whole_masked_batch_agrees_with_rlax_under_its_own_mask(rlax):
    """Its `sample_mask` carries the error over a gap, but reads the value there: it must be the next action's."""
    import jax

    call = jax.vmap(
        lambda *row: rlax.vtrace_td_error_and_advantage(*row[:5], clip_rho_threshold=2.0, sample_mask=row[5])
    )
    for rows in batches():
        values, following = rows.values.clone(), torch.empty_like(rows.values)
        upcoming = rows.bootstrap.clone()
        for t in reversed(range(rows.mask.shape[1])):
            following[:, t] = upcoming
            upcoming = torch.where(rows.mask[:, t], values[:, t], upcoming)
            values[:, t] = upcoming
        ratios = (rows.policy - rows.behavior).exp()
        arrays = [t.numpy() for t in (values, following, rows.rewards, rows.gamma, ratios, rows.mask)]
        out = call(*arrays)
        result = ours(rows, rho_bar=2.0)
        agree(result.targets, numpy.where(rows.mask, out.errors + arrays[0], 0.0))
        agree(result.advantages, numpy.where(rows.mask, out.q_estimate - arrays[0], 0.0))


@pytest.mark.parametrize(("rho_bar", "own_bar"), [(1.0, 1.0), (3.0, 2.0)])
def test_targets_and_advantages_agree_with_the_new_rllib(rllib, rho_bar, own_bar):
    """Time-major; advantages with the own ratio."""

    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        columns = [torch.from_numpy(array)[:, None] for array in (policy, behavior, gamma, rewards, values)]
        names = ("target_action_log_probs", "behaviour_action_log_probs", "discounts", "rewards", "values")
        targets, advantages = rllib.vtrace_torch(
            **dict(zip(names, columns, strict=True)),
            bootstrap_values=torch.tensor([bootstrap], dtype=torch.float64),
            clip_rho_threshold=rho_bar,
            clip_pg_rho_threshold=own_bar,
        )
        return targets[:, 0], advantages[:, 0]

    for rows in batches():
        targets, advantages = row_by_row(rows, oracle, *FIELDS)
        result = ours(rows, rho_bar=rho_bar, rho_bar_pg=own_bar)
        agree(result.targets, targets)
        agree(result.advantages, advantages)


def test_targets_and_advantages_agree_with_the_old_rllib_as_far_as_its_float32_goes(rllib):
    """It casts float64 to float32 silently, so it gets float32 and the tolerance is 2e-6."""

    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        columns = [torch.from_numpy(array)[:, None] for array in (policy - behavior, gamma, rewards, values)]
        out = rllib.from_importance_weights(*columns, torch.tensor([bootstrap]), 2.0, 1.0)
        assert out.vs.dtype == torch.float32
        return out.vs[:, 0], out.pg_advantages[:, 0]

    for rows in batches():
        targets, advantages = row_by_row(rows, oracle, *FIELDS)
        result = ours(rows, rho_bar=2.0, rho_bar_pg=1.0)
        agree(result.targets, targets, 2e-6)
        agree(result.advantages, advantages, 2e-6)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (0.8, 0.5), (2.5, 1.7)])
@pytest.mark.parametrize("terminated", [True, False])
def test_targets_and_advantages_agree_with_torchrl(torchrl, rho_bar, c_bar, terminated):
    """The only one with a free c_bar; no lambda; the advantage uses rho_bar; gamma is one number.

    A row that is cut is `done` without being `terminated` and bootstraps from the next value.
    """

    def oracle(policy, behavior, rewards, values, bootstrap):
        length = len(values)
        done = torch.zeros(1, length, 1, dtype=torch.bool)
        done[0, -1] = True
        columns = [
            torch.from_numpy(array).view(1, length, 1)
            for array in (policy, behavior, values, shifted(values, bootstrap), rewards)
        ]
        ended = done if terminated else torch.zeros_like(done)
        advantages, targets = torchrl.vtrace_advantage_estimate(0.93, *columns, done, ended, rho_bar, c_bar)
        return targets.flatten(), advantages.flatten()

    for rows in batches():
        rows = rows.change(bootstrap=rows.bootstrap * (not terminated))
        targets, advantages = row_by_row(rows, oracle, "policy", "behavior", "rewards", "values")
        result = ours(rows, gamma=0.93, rho_bar=rho_bar, c_bar=c_bar, rho_bar_pg=rho_bar)
        agree(result.targets, targets)
        agree(result.advantages, advantages)
