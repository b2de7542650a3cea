"""From logits to log-probs, from rows to tokens, and whitening."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces
from tests.kit.each import each

from .rows import action_lists, random_rows

SEEDS = range(4)


def random_logits(seed, *, shape=(3, 5, 7)):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, shape[-1], shape[:2], generator=generator)


@each("seed", SEEDS)
@pytest.mark.parametrize("chunk", [1, 4, 7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "rows"])
def test_log_probs_are_those_of_the_tempered_softmax(temperature, chunk, seed):
    logits, tokens = random_logits(seed)
    heat = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64) if temperature == "rows" else temperature

    chosen = pieces.token_logprobs(logits, tokens, temperature=heat, chunk=chunk)

    scaled = logits / (heat[:, None, None] if temperature == "rows" else heat)
    assert torch.allclose(chosen, scaled.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1), atol=1e-12)


@pytest.mark.parametrize("chunk", [2, 1024])
def test_gradients_of_log_probs(chunk):
    logits, tokens = random_logits(0)
    heat = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)

    chosen = partial(pieces.token_logprobs, tokens=tokens, temperature=heat, chunk=chunk)
    assert torch.autograd.gradcheck(chosen, (logits.requires_grad_(),))


def test_half_precision_logits_are_computed_in_float32_and_receive_their_own_gradient_type():
    logits, tokens = random_logits(2)
    half = logits.to(torch.bfloat16).requires_grad_()

    chosen = pieces.token_logprobs(half, tokens)
    chosen.sum().backward()

    assert chosen.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16
    assert torch.allclose(chosen.double(), pieces.token_logprobs(half.detach().double(), tokens), atol=1e-5)


def test_the_backward_pass_keeps_no_copy_of_the_logits():
    logits, tokens = random_logits(3)
    logits.requires_grad_()
    saved = []

    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        pieces.token_logprobs(logits, tokens)

    big = [t for t in saved if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in big] == [logits.data_ptr()]


@each("seed", SEEDS)
def test_terminal_scores_stand_on_the_last_action_token(seed):
    rows = random_rows(seed)

    placed = alg.place_terminal(rows.scores, rows.mask)

    for i in range(rows.mask.shape[0]):
        positions = rows.mask[i].nonzero().flatten().tolist()
        expected = torch.zeros(rows.mask.shape[1], dtype=torch.float64)
        if positions:
            expected[positions[-1]] = rows.scores[i]
        assert torch.equal(placed[i], expected)


@each("seed", SEEDS)
def test_broadcast_rows_fills_action_tokens(seed):
    rows = random_rows(seed)

    assert torch.equal(alg.broadcast_rows(rows.scores, rows.mask), rows.mask * rows.scores[:, None])


@each("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9, "tokens"])
def test_reward_to_go_discounts_action_tokens_only(gamma, seed):
    rows = random_rows(seed)
    given = rows.gamma if gamma == "tokens" else gamma

    result = alg.reward_to_go(rows.rewards, rows.mask, gamma=given)

    for i, (rewards, gammas) in enumerate(action_lists(rows, "rewards", "gamma")):
        factors = gammas if gamma == "tokens" else [gamma] * len(rewards)
        expected = [
            sum(math.prod(factors[s:t]) * rewards[t] for t in range(s, len(rewards))) for s in range(len(rewards))
        ]
        assert result[i][rows.mask[i]].tolist() == pytest.approx(expected)


@each("seed", SEEDS)
def test_whitening_is_mean_and_unbiased_std_of_all_action_tokens(seed):
    rows = random_rows(seed)
    values = rows.advantages[rows.mask].numpy()

    white = alg.whiten(rows.advantages, rows.mask)

    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-8)
    assert white[rows.mask].numpy() == pytest.approx(expected, abs=1e-12)


@each("seed", SEEDS)
def test_whitening_by_parts_with_summed_moments_equals_whitening_at_once(seed):
    rows = random_rows(seed)
    x, m = rows.advantages, rows.mask

    total = alg.moments(x[:2], m[:2]) + alg.moments(x[2:], m[2:])
    parts = torch.cat([alg.whiten(x[:2], m[:2], moments=total), alg.whiten(x[2:], m[2:], moments=total)])

    assert torch.allclose(parts, alg.whiten(x, m), atol=1e-12)


@pytest.mark.parametrize("constant", [0.1, 1e6, -3.0])
def test_whitening_a_constant_or_a_single_token_gives_nearly_zero(constant):
    mask = torch.ones(3, 50, dtype=torch.bool)

    assert alg.whiten(torch.full((3, 50), constant), mask).abs().max() < 1e-2
    one = torch.zeros(1, 4, dtype=torch.bool)
    one[0, 2] = True
    assert (alg.whiten(torch.full((1, 4), constant), one) == 0).all()


def test_moments_are_float64_for_float32_values():
    values = torch.full((1, 1000), 1.0 + 2**-20)
    result = alg.moments(values, torch.ones(1, 1000, dtype=torch.bool))

    assert result.total.dtype == torch.float64
    assert float(result.total) == 1000 * (1 + 2**-20)
    assert float(result.total_squares) == pytest.approx(1000 * np.square(1 + 2**-20), rel=1e-14)
