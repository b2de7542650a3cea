"""KL estimators and what their gradients are, by enumeration of every action."""

import math

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from .rows import random_rows

NUM_ACTIONS = 6


def three_policies(seed):
    """Logits of pi, and log-probs of ref and mu, over six actions."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(NUM_ACTIONS, generator=generator, dtype=torch.float64) for _ in range(3)]
    return draw[0], draw[1].log_softmax(0), draw[2].log_softmax(0)


def expected_gradient(loss_of, sampler, logits):
    """Gradient in the logits of E_{a ~ sampler}[loss(a)], summed over the six actions; the sampler is a constant."""
    leaf = logits.clone().requires_grad_()
    policy = leaf.log_softmax(0)[None]
    mask = torch.ones(1, NUM_ACTIONS, dtype=torch.bool)
    (sampler.exp()[None] * loss_of(policy, mask)).sum().backward()
    return leaf.grad


def true_gradients(logits, reference):
    def grad(kl):
        leaf = logits.clone().requires_grad_()
        kl(leaf.log_softmax(0)).backward()
        return leaf.grad

    reverse = grad(lambda p: (p.exp() * (p - reference)).sum())
    forward = grad(lambda p: (reference.exp() * (reference - p)).sum())
    return {"reverse": reverse, "forward": forward, "zero": torch.zeros_like(logits)}


@each("seed", range(5))
@pytest.mark.parametrize(
    "kind, meaning",
    [("k2_is", "reverse"), ("k1_is", "reverse"), ("k3_is", "reverse"), ("k2", None), ("k3", None)],
)
def test_kl_loss_kinds_on_samples_from_mu(kind, meaning, seed):
    logits, reference, behavior = three_policies(seed)

    grad = expected_gradient(
        lambda p, m: alg.kl_loss(behavior[None], p, reference[None], m, kind=kind, cap=1e9), behavior, logits
    )

    gap = (grad - true_gradients(logits, reference)["reverse"]).abs().max()
    assert gap < 1e-12 if meaning else gap > 1e-3


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_straight_through_kinds_have_one_value_and_the_gradient_of_another(kind):
    rows = random_rows(0)
    policy = rows.policy.clone().requires_grad_()

    result = alg.kl_loss(rows.behavior, policy, rows.reference, rows.mask, kind=kind)
    result.sum().backward()

    assert torch.allclose(result, alg.kl_estimate(rows.policy, rows.reference, rows.mask, kind=kind[:2]))
    assert torch.allclose(policy.grad, torch.where(rows.mask, rows.policy - rows.reference, 0.0))


@each("seed", range(4))
def test_estimates_are_their_formulas_and_unbiased_where_claimed(seed):
    logits, reference, _ = three_policies(seed)
    policy, mask = logits.log_softmax(0)[None], torch.ones(1, NUM_ACTIONS, dtype=torch.bool)
    truth = float((policy.exp() * (policy - reference)).sum())

    def mean(kind):
        return float((policy.exp() * alg.kl_estimate(policy, reference[None], mask, kind=kind)).sum())

    assert mean("k1") == pytest.approx(truth)
    assert mean("k3") == pytest.approx(truth)
    assert abs(mean("k2") - truth) > 1e-3
    for i in range(NUM_ACTIONS):
        x = float(policy[0, i] - reference[i])
        values = [float(alg.kl_estimate(policy, reference[None], mask, kind=k)[0, i]) for k in ("k1", "k2", "k3")]
        assert values == pytest.approx([x, x * x / 2, math.exp(-x) - 1 + x])


def test_k3_is_clamped_with_gradient_zero_beyond():
    mask = torch.ones(1, 2, dtype=torch.bool)
    policy = torch.tensor([[-10.0, -1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.0, -1.5]], dtype=torch.float64)

    value = alg.kl_estimate(policy, reference, mask)
    value.sum().backward()

    assert value[0, 0].item() == 10.0
    assert policy.grad[0, 0] == 0 and policy.grad[0, 1] != 0


@pytest.mark.parametrize("likely", [0.1, 0.03, 0.01, 1e-4])
def test_k3_is_pulls_back_however_far_the_policy_has_gone(likely):
    first, others = torch.eye(NUM_ACTIONS, dtype=torch.float64)[0].bool(), NUM_ACTIONS - 1
    logits, reference, behavior = (
        torch.where(first, p, (1 - p) / others).log() for p in torch.tensor([likely, 0.5, 0.4], dtype=torch.float64)
    )

    grad = expected_gradient(
        lambda p, m: alg.kl_loss(behavior[None], p, reference[None], m, kind="k3_is"), behavior, logits
    )

    assert (grad - true_gradients(logits, reference)["reverse"]).abs().max() < 1e-12


def test_k2_is_uses_its_own_cap():
    mask = torch.ones(1, 1, dtype=torch.bool)
    behavior, policy, reference = (torch.full((1, 1), x, dtype=torch.float64) for x in (-3.0, -1.0, -2.0))

    assert float(alg.kl_loss(behavior, policy, reference, mask)) == pytest.approx(2.0 * 0.5)
    assert float(alg.kl_loss(behavior, policy, reference, mask, cap=100.0)) == pytest.approx(math.exp(2) * 0.5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_shaped_rewards_subtract_the_estimate(kind):
    rows = random_rows(1)

    shaped = alg.kl_shaped_rewards(rows.rewards, rows.policy, rows.reference, rows.mask, beta=0.3, kind=kind)

    estimate = alg.kl_estimate(rows.policy, rows.reference, rows.mask, kind=kind)
    assert torch.allclose(shaped, torch.where(rows.mask, rows.rewards, 0.0) - 0.3 * estimate)


def test_only_k1_as_a_reward_has_the_gradient_of_the_kl():
    """A reward is a number: the mean derivative of the estimate itself is lost, and is 0 for k1 alone."""
    logits, reference, _ = three_policies(5)
    leaf = logits.clone().requires_grad_()
    policy = leaf.log_softmax(0)
    kl = (policy.exp() * (policy - reference)).sum()
    (truth,) = torch.autograd.grad(kl, leaf)
    misses = {}
    for kind in ("k1", "k2", "k3"):
        def as_reward(policy, mask, kind=kind):
            return alg.kl_estimate(policy.detach(), reference[None], mask, kind=kind) * policy

        found = expected_gradient(as_reward, logits.log_softmax(0), logits)
        misses[kind] = float((found - truth).norm() / truth.norm())
    assert misses["k1"] < 1e-9 and misses["k2"] > 0.1 and misses["k3"] > 0.1


def test_rewards_carry_the_future_kl_terms_that_a_loss_per_token_misses():
    """The gradient of the sequence KL of a two-token policy, by enumeration: only the shaped reward reaches it."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(3, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
    ref_first = torch.zeros(3, dtype=torch.float64).log_softmax(-1)
    pairs = [(a, b) for a in range(3) for b in range(3)]

    def logprobs():
        one, two = first.log_softmax(0), second.log_softmax(1)
        return torch.stack([torch.stack([one[a], two[a, b]]) for a, b in pairs])

    reference = torch.stack([torch.stack([ref_first[a], ref[a, b]]) for a, b in pairs])
    mask = torch.ones(9, 2, dtype=torch.bool)
    probs = logprobs().sum(1).exp().detach()

    def grads(total):
        return torch.autograd.grad(total, (first, second))

    lp = logprobs()
    truth = grads((lp.sum(1).exp() * (lp - reference).sum(1)).sum())
    shaped = alg.kl_shaped_rewards(torch.zeros(9, 2).double(), lp, reference, mask, beta=1.0)
    through_rewards = grads(
        (probs[:, None] * alg.reinforce(logprobs(), alg.reward_to_go(shaped, mask), mask).losses).sum()
    )
    lp = logprobs()
    per_token = grads((probs[:, None] * alg.kl_loss(lp, lp, reference, mask)).sum())

    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(through_rewards, truth, strict=True))
    assert not torch.allclose(per_token[0], truth[0], atol=1e-3)
