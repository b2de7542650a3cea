"""KL estimates against verl, in value and gradient."""

import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches, same_loss


def penalty(rows, policy_logprobs, kind):
    """k1 is no loss of its own here (alone it has no gradient in expectation), only an estimate."""
    if kind == "k1":
        return alg.kl_estimate(policy_logprobs, rows.reference, rows.mask, kind="k1")
    return alg.kl_loss(rows.behavior, policy_logprobs, rows.reference, rows.mask, kind=kind)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_estimates_and_their_straight_through_forms_agree_with_verl(verl, kind):
    """It clamps the log-ratio at 20 for k3 only; nothing here is that far."""
    for rows in batches():
        same_loss(
            lambda leaf, rows=rows: (penalty(rows, leaf, kind) * rows.weights).sum(),
            lambda leaf, rows=rows: (verl.kl_penalty(leaf, rows.reference, kind) * rows.weights)[rows.mask].sum(),
            rows.policy,
            1e-12,
        )


@pytest.mark.parametrize("distance", [-30.0, -3.0, -2.0, 5.0, 15.0, 30.0])
def test_the_clamps_of_k3_agree_with_verl(verl, distance):
    """The log-ratio at 20, the result at 10, and no gradient beyond either."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    reference = torch.full((1, 1), -1.0, dtype=torch.float64)
    same_loss(
        lambda leaf: alg.kl_estimate(leaf, reference, mask, kind="k3").sum(),
        lambda leaf: verl.kl_penalty(leaf, reference, "k3").sum(),
        reference + distance,
        1e-12,
    )


def test_shaped_rewards_agree_with_verl(verl):
    for rows in batches():
        theirs = verl.compute_rewards(rows.rewards, rows.policy, rows.reference, 0.1)
        ours = alg.kl_shaped_rewards(rows.rewards, rows.policy, rows.reference, rows.mask, beta=0.1)
        agree(ours, torch.where(rows.mask, theirs, 0.0))
