"""GAE (arXiv:1506.02438) against rlax, torchrl and verl."""

import numpy
import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, as_tensor, batches, row_by_row, shifted


def ours(rows, **knobs):
    return alg.gae(rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, **knobs)


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_advantages_agree_with_rlax(rlax, lam):
    """Its `values` have one entry more, the bootstrap value; gamma is per token."""

    def oracle(rewards, values, gamma, bootstrap):
        every = numpy.append(values, bootstrap)
        return (rlax.truncated_generalized_advantage_estimation(rewards, gamma, lam, every),)

    for rows in batches():
        (advantages,) = row_by_row(rows, oracle, "rewards", "values", "gamma")
        agree(ours(rows, gamma=rows.gamma, lam=lam).advantages, advantages)


@pytest.mark.parametrize("terminated", [True, False])
def test_advantages_and_targets_agree_with_torchrl(torchrl, terminated):
    """A row that is cut is `done` without being `terminated` and bootstraps from the next value; gamma is a number."""

    def oracle(rewards, values, bootstrap):
        length = len(values)
        done = torch.zeros(1, length, 1, dtype=torch.bool)
        done[0, -1] = True
        columns = [torch.from_numpy(a).view(1, length, 1) for a in (values, shifted(values, bootstrap), rewards)]
        ended = done if terminated else torch.zeros_like(done)
        advantages, targets = torchrl.generalized_advantage_estimate(0.93, 0.9, *columns, done, ended)
        return advantages.flatten(), targets.flatten()

    for rows in batches():
        rows = rows.change(bootstrap=rows.bootstrap * (not terminated))
        advantages, targets = row_by_row(rows, oracle, "rewards", "values")
        result = ours(rows, gamma=0.93, lam=0.9)
        agree(result.advantages, advantages)
        agree(result.targets, targets)


def test_targets_and_whitened_advantages_of_a_masked_batch_agree_with_verl(verl):
    """It steps over observation tokens as we do, never bootstraps, and whitens inside, with `rsqrt(var + 1e-8)`.

    What it returns at masked positions is undefined.
    """
    for rows in batches():
        rows = rows.change(bootstrap=torch.zeros_like(rows.bootstrap))
        advantages, targets = verl.compute_gae_advantage_return(
            rows.rewards, rows.values, rows.mask.double(), gamma=0.93, lam=0.9
        )
        result = ours(rows, gamma=0.93, lam=0.9)
        agree(result.targets[rows.mask], targets[rows.mask])
        agree(alg.whiten(result.advantages, rows.mask)[rows.mask], as_tensor(advantages)[rows.mask], 1e-7)
