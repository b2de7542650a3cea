"""TD(lambda) and n-step returns against rlax and torchrl."""

import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches, row_by_row, shifted


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_td_lambda_targets_agree_with_rlax(rlax, lam):
    def oracle(rewards, values, gamma, bootstrap):
        return (rlax.lambda_returns(rewards, gamma, shifted(values, bootstrap), lam),)

    for rows in batches():
        (targets,) = row_by_row(rows, oracle, "rewards", "values", "gamma")
        result = alg.td_lambda(
            rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=rows.gamma, lam=lam
        )
        agree(result.targets, targets)


@pytest.mark.parametrize("terminated", [True, False])
def test_td_lambda_targets_agree_with_torchrl(torchrl, terminated):
    """`rolling_gamma`, its default, ties each gamma to its own step as we do."""

    def oracle(rewards, values, gamma, bootstrap):
        done = torch.zeros(1, len(values), 1, dtype=torch.bool)
        done[0, -1] = True
        discounts, following, paid = (
            torch.from_numpy(array).view(done.shape) for array in (gamma, shifted(values, bootstrap), rewards)
        )
        ended = done if terminated else torch.zeros_like(done)
        return (torchrl.td_lambda_return_estimate(discounts, 0.7, following, paid, done, ended).flatten(),)

    for rows in batches():
        rows = rows.change(bootstrap=rows.bootstrap * (not terminated))
        (targets,) = row_by_row(rows, oracle, "rewards", "values", "gamma")
        result = alg.td_lambda(
            rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=rows.gamma, lam=0.7
        )
        agree(result.targets, targets)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_n_step_targets_agree_with_rlax(rlax, n):
    """Near the end both take the steps that are left and bootstrap once."""

    def oracle(rewards, values, gamma, bootstrap):
        return (rlax.n_step_bootstrapped_returns(rewards, gamma, shifted(values, bootstrap), n=n),)

    for rows in batches():
        (targets,) = row_by_row(rows, oracle, "rewards", "values", "gamma")
        result = alg.n_step(
            rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=rows.gamma, n=n
        )
        agree(result.targets, targets)
