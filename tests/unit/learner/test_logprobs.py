"""The chunked head against log_softmax over the whole vocabulary."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.data.packing import TokenSets
from learner.data.transfer import on_device
from learner.model.scoring.logprobs import LogitRule, inspect_tokens, mass_below, measure_logit_rule, score_tokens

M, H, V = 11, 6, 17


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, H, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(V, H, dtype=dtype, generator=generator).requires_grad_()
    bias = torch.randn(V, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(0, V, (M,), generator=generator)
    temperatures = 0.5 + torch.rand(M, dtype=dtype, generator=generator)
    return hidden, weight, bias, targets, temperatures


def by_the_book(hidden, weight, bias, targets, temperatures):
    log_p = ((hidden @ weight.T + bias) / temperatures[:, None]).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 1000])
def test_values_and_gradients_are_those_of_log_softmax_for_every_chunk_size(chunk):
    hidden, weight, bias, targets, temperatures = inputs()
    ours = score_tokens(hidden, weight, targets, temperatures, bias=bias, chunk_tokens=chunk)
    theirs = by_the_book(hidden, weight, bias, targets, temperatures)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)

    up = torch.randn(2, M, dtype=torch.float64)
    got = torch.autograd.grad((ours[0] * up[0] + ours[1] * up[1]).sum(), (hidden, weight, bias))
    expected = torch.autograd.grad((theirs[0] * up[0] + theirs[1] * up[1]).sum(), (hidden, weight, bias))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradcheck_in_float64_for_each_output(outputs):
    hidden, weight, bias, targets, temperatures = inputs()

    def score(h, w, b):
        both = score_tokens(h, w, targets, temperatures, bias=b, chunk_tokens=3)
        return tuple(both[i] for i in outputs)

    assert torch.autograd.gradcheck(score, (hidden, weight, bias))


RULES = {"scaled": LogitRule(0.0625), "capped": LogitRule(1.0, 3.0), "scaled and capped": LogitRule(2.5, 4.0)}


@pytest.mark.parametrize("kind", RULES)
def test_scaled_and_capped_logits_give_the_values_and_gradients_of_log_softmax(kind):
    hidden, weight, bias, targets, temperatures = inputs()
    rule = RULES[kind]
    ours = score_tokens(hidden, weight, targets, temperatures, bias=bias, rule=rule, chunk_tokens=4)
    squares, _ = inspect_tokens(hidden, weight, temperatures, bias=bias, rule=rule, chunk_tokens=4)

    logits = rule.scale * (hidden @ weight.T + bias)
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    log_p = (logits / temperatures[:, None]).log_softmax(-1)
    theirs = log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(squares, (2 * log_p).exp().sum(-1), atol=1e-12, rtol=1e-12)
    up = torch.randn(2, M, dtype=torch.float64)
    got = torch.autograd.grad((ours[0] * up[0] + ours[1] * up[1]).sum(), (hidden, weight, bias))
    expected = torch.autograd.grad((theirs[0] * up[0] + theirs[1] * up[1]).sum(), (hidden, weight, bias))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", RULES)
def test_the_rule_is_read_off_logits_and_no_other_function_passes_for_one(kind):
    hidden, weight, bias, _, _ = inputs(torch.float32)
    head = torch.nn.Linear(H, V)
    head.weight.data, head.bias.data = weight.detach(), bias.detach()
    rule, raw = RULES[kind], head(hidden).detach()

    measured = measure_logit_rule([hidden.detach()], [rule(raw.clone())], head, cap=rule.cap)

    assert measured.scale == pytest.approx(rule.scale, rel=1e-6) and measured.cap == rule.cap
    with pytest.raises(ValueError, match="neither a multiple"):
        measure_logit_rule([hidden.detach()], [raw.abs().sqrt()], head, cap=None)


@pytest.mark.shows("learner.logprob_chunk_tokens")
def test_no_tensor_larger_than_a_chunk_of_logits_is_ever_made():
    big_v, tokens, chunk = 500, 200, 8
    hidden = torch.randn(tokens, H, requires_grad=True)
    weight = torch.randn(big_v, H, requires_grad=True)
    sizes: list[int] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and big_v in tensor.shape and tensor.shape != weight.shape:
                    sizes.append(tensor.numel())
            return out

    targets = torch.zeros(tokens, dtype=torch.int64)
    with Spy():
        logprobs, entropy = score_tokens(hidden, weight, targets, torch.ones(tokens), chunk_tokens=chunk)
        (logprobs.sum() + entropy.sum()).backward()

    assert sizes and max(sizes) <= max(chunk * big_v, H * big_v)


@pytest.mark.parametrize(("chunk", "products"), [(200, 1), (64, 4 + 3), (1000, 1)])
def test_the_logits_of_the_last_chunk_are_computed_once(chunk, products):
    hidden, weight = torch.randn(200, H, requires_grad=True), torch.randn(500, H, requires_grad=True)
    targets, ones = torch.zeros(200, dtype=torch.int64), torch.ones(200)
    found: list[int] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default and out.shape[1] == 500:
                found.append(out.shape[0])
            return out

    with Spy():
        total = sum(part.sum() for part in score_tokens(hidden, weight, targets, ones, chunk_tokens=chunk))
        first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
        assert len(found) == products
        again = torch.autograd.grad(total, (hidden, weight))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_half_precision_inputs_are_summed_in_float32():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 2048, generator=generator).bfloat16()
    weight = torch.randn(9, 2048, generator=generator).bfloat16()
    targets = torch.zeros(4, dtype=torch.int64)

    logprobs, _ = score_tokens(hidden, weight, targets, torch.full((4,), 30.0))

    exact, _ = by_the_book(hidden.double(), weight.double(), torch.zeros(9), targets, torch.full((4,), 30.0).double())
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=1e-5)


def test_gradients_of_half_precision_are_those_of_float32_within_its_rounding():
    """The factors of the products are rounded to half, as a GPU multiplies them; the sums over chunks are not."""
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 48), (301, 48))]
    targets, up = torch.randint(0, 301, (64,), generator=generator), torch.randn(2, 64, generator=generator)

    def gradients(dtype):
        hidden, weight = (value.detach().to(dtype).requires_grad_() for value in values)
        both = score_tokens(hidden, weight, targets, torch.ones(64), chunk_tokens=5)
        return torch.autograd.grad((both[0] * up[0] + both[1] * up[1]).sum(), (hidden, weight))

    for half, single in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert half.dtype == torch.bfloat16
        assert float((half.float() - single).norm() / single.norm()) < 6e-3  # of each factor and the result: 2^-9


def test_nothing_to_score_still_carries_a_gradient_of_zeros():
    hidden, weight, _, _, _ = inputs()
    empty = torch.zeros(0, dtype=torch.int64)

    logprobs, _ = score_tokens(hidden[:0], weight, empty, torch.zeros(0, dtype=torch.float64))
    logprobs.sum().backward()

    assert logprobs.numel() == 0 and not weight.grad.any() and not hidden.grad.any()


def test_extreme_logits_give_finite_numbers():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)

    logprobs, entropy = score_tokens(hidden, weight, torch.tensor([0, 0]), torch.ones(2))
    (logprobs.sum() + entropy.sum()).backward()

    torch.testing.assert_close(logprobs, torch.tensor([0.0, -2e4]))
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all() and torch.isfinite(entropy).all()


def test_a_chunk_of_nothing_is_refused():
    hidden, weight, _, targets, temperatures = inputs()
    with pytest.raises(ValueError, match="logprob_chunk_tokens"):
        score_tokens(hidden, weight, targets, temperatures, chunk_tokens=0)


SET_RULES = {"plain": LogitRule(), "scaled": LogitRule(0.25), "capped": LogitRule(2.5, 4.0)}


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
@pytest.mark.parametrize("kind", SET_RULES)
@pytest.mark.parametrize("chunk", [1, 1000])
def test_values_and_gradients_are_those_of_log_softmax_over_the_set(kind, tokens, chunk):
    (hidden, weight, bias, targets, temperatures), rule = inputs(), SET_RULES[kind]
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
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


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
    moved = on_device(whole, torch.device("cpu"))
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
