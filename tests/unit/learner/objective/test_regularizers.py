"""Each regularizer, enumerated: over a small vocabulary the expected gradient under mu is the one that it promises."""

from types import SimpleNamespace

import pytest
import torch

from bench.pieces import lagrangian_loss
from learner.data.transfer import read_at_once
from learner.objective.regularizers import Regularizers
from learner.objective.token_batch import PassOutputs
from streamrl.algorithms import kl_loss, log_ratios
from streamrl.config.schema import ConstraintConfig, KlConfig, LossConfig
from streamrl.metrics.meter import Meter

VOCAB = 6
TIS = LossConfig(surrogate="tis")


@pytest.fixture
def world():
    """Logits of policy, log-probs of mu and of the reference, all over one small vocabulary; float64."""
    generator = torch.Generator().manual_seed(0)
    policy, mu, reference = (torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(3))
    return policy.requires_grad_(), mu.log_softmax(0), reference.log_softmax(0)


def expected_gradient(world, loss_of) -> torch.Tensor:
    """Gradient in the logits of the mean under mu of `loss_of(behavior, policy, entropy, reference, mask)` [1, V].

    Every token of the vocabulary stands in the row once; mu weighs its loss.
    """
    logits, mu, reference = world
    policy = logits.log_softmax(0)
    entropy = -(policy.exp() * policy).sum().expand(1, VOCAB)
    mask = torch.ones(1, VOCAB, dtype=torch.bool)
    losses = loss_of(mu[None], policy[None], entropy, reference[None], mask)
    (gradient,) = torch.autograd.grad((mu.exp() * losses).sum(), logits)
    return gradient


def gradient_of(world, value_of) -> torch.Tensor:
    logits, _, reference = world
    (gradient,) = torch.autograd.grad(value_of(logits.log_softmax(0), reference), logits)
    return gradient


def reverse_kl(policy, reference):
    return (policy.exp() * (policy - reference)).sum()


def tokens_of(behavior, policy, entropy, reference, mask) -> SimpleNamespace:
    outputs = PassOutputs(policy=policy.detach(), reference=reference)
    return SimpleNamespace(
        behavior=behavior, policy=policy, entropy=entropy, mask=mask, outputs=outputs,
        log_ratios=log_ratios(behavior, policy, mask), scored=lambda name: getattr(outputs, name),
    )


def regularizers(mode="off", kl=0.0, *, cap=2.0, entropy=0.0, loss=TIS, limit_kl=(0, None), limit_entropy=(0, None)):
    """With these weights; a constraint is (multiplier, limit)."""
    multipliers = {"kl": limit_kl[0], "entropy": limit_entropy[0]}
    controls = SimpleNamespace(kl_coef=kl, entropy_coef=entropy, multipliers=multipliers)
    constraint = ConstraintConfig(kl_limit=limit_kl[1], entropy_min=limit_entropy[1])
    return Regularizers(KlConfig(mode=mode, cap=cap), constraint, loss, controls)


def with_terms(terms: Regularizers):
    def losses(behavior, policy, entropy, reference, mask):
        return terms.regularized(torch.zeros_like(policy), tokens_of(behavior, policy, entropy, reference, mask))

    return losses


def test_a_kl_constraint_moves_with_the_gradient_of_the_reverse_kl_times_its_multiplier(world):
    terms = regularizers(cap=100.0, limit_kl=(0.7, 0.1))

    expected = gradient_of(world, lambda p, r: lagrangian_loss(reverse_kl(p, r), 0.1, 0.7))
    assert float(expected.norm()) > 0.01
    torch.testing.assert_close(expected_gradient(world, with_terms(terms)), expected)


def test_an_entropy_constraint_raises_the_entropy(world):
    terms = regularizers(limit_entropy=(0.7, 2.0))

    def value(policy, _):
        return lagrangian_loss(-(policy.exp() * policy).sum(), 2.0, 0.7, sense="min")

    torch.testing.assert_close(expected_gradient(world, with_terms(terms)), gradient_of(world, value))


def test_the_mean_of_a_constraint_over_tokens_is_its_lagrangian(world):
    logits, mu, reference = world
    policy = logits.log_softmax(0)[None]
    entropy, mask = torch.full_like(policy, 1.5), torch.ones(1, VOCAB, dtype=torch.bool)
    terms = regularizers(limit_kl=(0.7, 0.1), limit_entropy=(0.3, 2.0))
    losses = with_terms(terms)(mu[None], policy, entropy, reference[None], mask)

    expected = lagrangian_loss(reverse_kl(policy, reference), 0.1, 0.7) + lagrangian_loss(1.5, 2.0, 0.3, sense="min")
    torch.testing.assert_close((mu.exp() * losses).sum(), expected)


def test_kl_in_the_advantages_has_the_gradient_of_the_reverse_kl_with_the_surrogates_ratio(world):
    def surrogate(behavior, policy, entropy, reference, mask):
        tokens = tokens_of(behavior, policy, entropy, reference, mask)
        shaped = regularizers("advantage", 0.7).shaped_advantages(torch.zeros_like(policy), tokens)
        return -(policy - behavior).exp() * shaped

    def without_ratio(behavior, policy, entropy, reference, mask):
        tokens = tokens_of(behavior, policy, entropy, reference, mask)
        own = regularizers("advantage", 0.7, cap=100.0, loss=LossConfig(surrogate="reinforce"))
        return -policy * own.shaped_advantages(torch.zeros_like(policy), tokens)

    expected = gradient_of(world, lambda p, r: 0.7 * reverse_kl(p, r))
    torch.testing.assert_close(expected_gradient(world, surrogate), expected)
    torch.testing.assert_close(expected_gradient(world, without_ratio), expected)


def test_the_own_weight_of_kl_advantages_is_capped():
    behavior, policy, reference = torch.tensor([[-3.0]]), torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    own = regularizers("advantage", 0.5, cap=2.0, loss=LossConfig(surrogate="reinforce"))
    shaped = own.shaped_advantages(torch.ones(1, 1), tokens_of(behavior, policy, None, reference, mask))

    assert shaped.tolist() == [[1 - 0.5 * 2.0 * 1.0]]


def test_terms_of_the_loss_add_up_and_a_kl_in_the_reward_adds_nothing_here(world):
    logits, mu, reference = world
    policy = logits.log_softmax(0)[None].float().detach()
    behavior, anchor, mask = mu[None].float(), reference[None].float(), torch.ones(1, VOCAB, dtype=torch.bool)
    entropy, losses = torch.full_like(policy, 1.5), torch.rand_like(policy)

    def added(terms):
        return terms.regularized(losses, tokens_of(behavior, policy, entropy, anchor, mask)) - losses

    torch.testing.assert_close(
        added(regularizers("k2_is", 0.5, cap=1.1, entropy=0.1)),
        0.5 * kl_loss(behavior, policy, anchor, mask, kind="k2_is", cap=1.1) - 0.15,
    )
    assert not added(regularizers("reward_k1", 0.5)).any() and not added(regularizers("k2_is")).any()


def test_the_kl_of_a_row_is_the_log_ratio_of_its_whole_trajectory():
    policy = torch.tensor([[-1.0, -2.0, 7.0], [-1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.5, -2.5, 0.0], [-1.0, -1.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])

    tokens = tokens_of(policy, policy, None, reference, mask)
    assert regularizers("reward_k1", 0.5).row_penalties(tokens).tolist() == [0.5, -0.5]


def measured(policy, reference, behavior=None) -> dict:
    behavior, mask, meter = policy if behavior is None else behavior, torch.ones_like(policy, dtype=torch.bool), Meter()
    read_at_once(regularizers().measure(meter, tokens_of(behavior, policy, None, reference, mask), mask))
    return meter.flush(0)


def test_the_measured_kl_is_that_of_the_policy_though_its_tokens_are_from_mu(world):
    logits, mu, reference = world
    counts = (mu.exp() * 200_000).round().long()
    policy = logits.detach().log_softmax(0)
    tokens = torch.arange(VOCAB).repeat_interleave(counts)
    got = measured(policy[tokens][None], reference[tokens][None], mu[tokens][None])

    assert got["kl/value"] == pytest.approx(float(reverse_kl(policy, reference)), rel=1e-3)
    assert got["kl/clamped_fraction"] == 0.0


def test_clamped_tokens_are_counted():
    policy = torch.tensor([[-1.0, -9.0, -1.0, -30.0]])
    reference = torch.tensor([[-1.0, -1.0, -31.0, -1.0]])  # k3 over its bound, ratio over its bound, both

    assert measured(policy, reference)["kl/clamped_fraction"] == 0.75
