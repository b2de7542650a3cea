"""Scoring over sets of ids against log_softmax of the whole vocabulary with all other ids removed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.data.token_sets import TokenSets
from learner.model.scoring.logprobs import LogitRule, inspect_tokens, mass_below, score_tokens
from tests.unit.learner.test_logprob_head import H, M, V, inputs

RULES = {"plain": LogitRule(), "scaled": LogitRule(0.25), "capped": LogitRule(2.5, 4.0)}


def sets_for(targets: torch.Tensor, tokens: list[int], vocab: int, most: int, seed: int = 3) -> TokenSets:
    """A random set around each of these tokens; the first is of the token alone."""
    generator = np.random.default_rng(seed)
    sets = []
    for place, token in enumerate(tokens):
        others = generator.choice(vocab, size=generator.integers(1, most), replace=False) if place else []
        sets.append(np.unique([*others, int(targets[token])]).astype(np.int64))
    owner = torch.tensor([place for place, one in enumerate(sets) for _ in one])
    ids = torch.from_numpy(np.concatenate(sets))
    chosen = (ids == targets[tokens][owner]).nonzero()[:, 0]
    return TokenSets(torch.tensor(tokens), owner, ids, chosen)


def transcription(hidden, weight, bias, targets, temperatures, rule, sets):
    """Log-probs of every id [M, V], -inf outside a token's set."""
    logits = rule.scale * (hidden @ weight.T + bias)
    logits = (logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)) / temperatures[:, None]
    inside = torch.ones(M, V, dtype=torch.bool)
    inside[sets.tokens] = False
    inside[sets.tokens[sets.owner], sets.ids] = True
    return logits.masked_fill(~inside, float("-inf")).log_softmax(-1)


@pytest.mark.parametrize("tokens", [list(range(M)), [0, 2, 3, 7, 10]], ids=["every token", "some tokens"])
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("chunk", [1, 1000])
def test_values_and_gradients_are_those_of_log_softmax_over_the_set(kind, tokens, chunk):
    (hidden, weight, bias, targets, temperatures), rule = inputs(), RULES[kind]
    sets = sets_for(targets, tokens, V, 9)
    options = {"bias": bias, "rule": rule, "chunk_tokens": chunk, "sets": sets}
    ours = score_tokens(hidden, weight, targets, temperatures, **options)
    squares, everything = inspect_tokens(hidden, weight, temperatures, keep_all=True, **options)
    below = mass_below(hidden, weight, targets, temperatures, **options)

    log_p = transcription(hidden, weight, bias, targets, temperatures, rule, sets)
    finite = log_p.masked_fill(log_p == float("-inf"), 0.0)
    theirs = log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * finite).sum(-1)
    for mine, reference in (
        *zip(ours, theirs, strict=True), (squares, (2 * log_p).exp().sum(-1)), (everything, log_p),
        (below, (log_p.exp() * (torch.arange(V) < targets[:, None])).sum(-1)),
    ):
        torch.testing.assert_close(mine, reference.detach() if not mine.requires_grad else reference, atol=1e-12,
                                   rtol=1e-12)
    up = torch.randn(2, M, dtype=torch.float64)
    got = torch.autograd.grad((ours[0] * up[0] + ours[1] * up[1]).sum(), (hidden, weight, bias))
    expected = torch.autograd.grad((theirs[0] * up[0] + theirs[1] * up[1]).sum(), (hidden, weight, bias))
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-12, rtol=1e-12)


def test_sets_of_the_whole_vocabulary_give_what_no_sets_give():
    hidden, weight, bias, targets, temperatures = inputs()
    whole = TokenSets(
        torch.arange(M), torch.arange(M).repeat_interleave(V), torch.arange(V).repeat(M), torch.arange(M) * V + targets
    )
    for mine, reference in zip(
        score_tokens(hidden, weight, targets, temperatures, bias=bias, sets=whole),
        score_tokens(hidden, weight, targets, temperatures, bias=bias), strict=True,
    ):
        torch.testing.assert_close(mine, reference, atol=1e-12, rtol=1e-12)
    assert whole.sizes.tolist() == [V] * M
    moved = replace(whole).to(torch.device("cpu"))
    assert torch.equal(moved.ids, whole.ids)


def test_no_logits_of_the_whole_vocabulary_are_ever_made():
    vocab, count = 500, 40
    hidden = torch.randn(count, H, requires_grad=True)
    weight = torch.randn(vocab, H, requires_grad=True)
    targets = torch.randint(0, vocab, (count,))
    sets = sets_for(targets, list(range(count)), vocab, 12)
    largest = 0

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.shape != weight.shape:
                    largest = max(largest, tensor.numel())
            return out

    with Spy():
        logprobs, entropy = score_tokens(hidden, weight, targets, torch.ones(count), chunk_tokens=2, sets=sets)
        (logprobs.sum() + entropy.sum()).backward()

    assert 0 < largest <= max(len(sets.ids), 4 * 2 * H, count * H) < count * vocab


def test_half_precision_is_summed_in_float32():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((4, 2048), (9, 2048)))
    targets = torch.tensor([0, 1, 2, 3])
    sets = sets_for(targets, [0, 1, 2, 3], 9, 6)
    wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    narrow = hidden.requires_grad_(), weight.requires_grad_()
    found, exact = (
        score_tokens(*one, targets, torch.full((4,), 30.0, dtype=dtype), sets=sets)
        for one, dtype in ((narrow, torch.float32), (wide, torch.float64))
    )
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), exact[0], atol=1e-5, rtol=1e-5)
    half, double = (torch.autograd.grad(out[0].sum(), one) for out, one in ((found, narrow), (exact, wide)))
    for mine, reference in zip(half, double, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), reference, atol=1e-3, rtol=1e-2)
