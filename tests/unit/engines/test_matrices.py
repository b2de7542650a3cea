"""Products with installed matrices: packed ones to the last bits, int8 ones exactly by their definition."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.native import matrices
from actors.engines.native.matrices import multiplies_bytes, product
from actors.engines.native.weights import round_to_int8_
from tests.kit.each import each
from tests.unit.engines.tiny_models import V2, document, engine_for, prompt_of, request, truth_logprobs

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def all_packed(monkeypatch):
    monkeypatch.setattr(matrices, "PACK_FROM", 1)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each("num_tokens", [1, 2, 16, 17, 130])
def test_a_matrix_is_packed_from_a_size_on_and_gives_the_same_sums(num_tokens, monkeypatch):
    monkeypatch.undo()  # of the count before
    weight, bias, inputs = drawn(48, 40), drawn(48, seed=1), drawn(num_tokens, 40, seed=2)
    plain = product([weight], [bias])(inputs)
    assert "weight" in product([weight], [bias]).keywords
    monkeypatch.setattr(matrices, "PACK_FROM", weight.numel())
    packed = product([weight], [bias])
    assert not hasattr(packed, "keywords")
    torch.testing.assert_close(packed(inputs), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product([weight], [])(inputs), plain - bias, atol=1e-5, rtol=1e-5)
    assert "weight" in product([weight[1:]], [bias[1:]]).keywords


def levels(row: list[float]) -> tuple[list[int], float]:
    """The integers of a row and its scale, by the words of the definition."""
    scale = max(map(abs, row)) / 127
    return [round(value / scale) if scale else 0 for value in row], scale


def transcription(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    rows, tokens = map(levels, weight.tolist()), [levels(token) for token in inputs.tolist()]
    columns = [
        [sum(a * b for a, b in zip(row, token, strict=True)) * of_row * of_token for token, of_token in tokens]
        for row, of_row in rows
    ]
    return torch.tensor(columns).T


needs_bytes = pytest.mark.skipif(not multiplies_bytes(), reason="this processor cuts sums of byte products off")


@needs_bytes
def test_an_int8_product_is_that_of_the_rounded_rows_and_tokens(all_packed):
    weight, inputs, bias = drawn(24, 40), drawn(9, 40, seed=1) * torch.logspace(-6, 6, 9)[:, None], drawn(24, seed=2)
    weight[3], inputs[4] = 0.0, 0.0
    inputs[5], weight[6] = 1.0, -1.0  # the largest sums
    expected = transcription(weight, inputs)
    found = product([weight[:10], weight[10:]], [], int8=True)(inputs)
    torch.testing.assert_close(found, expected, atol=1e-30, rtol=1e-5)
    torch.testing.assert_close(product([weight], [bias], int8=True)(inputs), found + bias)
    assert not torch.allclose(found[0], inputs[0] @ weight.T, rtol=1e-4, atol=0.0)


@needs_bytes
def test_a_token_in_int8_depends_on_no_other(all_packed):
    multiply, inputs = product([drawn(64, 96)], [], int8=True), drawn(33, 96, seed=1)
    together = multiply(inputs)
    for place in (0, 7, 32):
        assert torch.equal(multiply(inputs[place : place + 1])[0], together[place])
    inputs[5], inputs[6, 2] = float("nan"), float("inf")
    broken = multiply(inputs)
    assert not broken[5].isfinite().any() and not broken[6].isfinite().any()
    assert torch.equal(broken[7:], together[7:])


def test_a_processor_that_cannot_multiply_bytes_gets_the_float32_product(all_packed, monkeypatch):
    weight, inputs = drawn(24, 40), drawn(3, 40, seed=1)
    monkeypatch.setattr(matrices, "multiplies_bytes", lambda: False)
    found = product([weight], [], int8=True)(inputs)
    torch.testing.assert_close(found, inputs @ weight.T, atol=1e-5, rtol=1e-5)


def llama(seed: int) -> torch.nn.Module:
    """Matrices of 64 rows and more."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def rounded_to_int8(model: torch.nn.Module) -> torch.nn.Module:
    """The model's own code over rounded matrices, whose inputs are rounded token by token."""
    model = copy.deepcopy(model)

    def round_inputs(module, args):
        rows = args[0].detach().flatten(0, -2).clone()
        round_to_int8_(rows)
        return (rows.view_as(args[0]),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            round_to_int8_(module.weight.data)
            module.register_forward_pre_hook(round_inputs)
    return model


@pytest.mark.parametrize("weights", ["full", pytest.param("int8", marks=needs_bytes)])
async def test_an_engine_packs_each_version_that_it_installs(weights, all_packed):
    prompt = prompt_of(9)
    async with engine_for(llama(0), weights=weights, max_tokens=64) as engine:
        for seed in (0, 1, 2):
            model = llama(seed)
            await engine.install(document(model), V2)
            found = await engine.generate(request(prompt, 12))
            truth = rounded_to_int8(model) if weights == "int8" else model
            expected = truth_logprobs(truth, prompt, found.token_ids)
            atol = 2e-2 if weights == "int8" else 1e-5  # a last bit of an input may be another level
            torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=atol, rtol=0)
            scores = await engine.score([*prompt, *found.token_ids], start=len(prompt), temperature=1.0)
            torch.testing.assert_close(scores, found.logprobs, atol=atol, rtol=0)
            if weights == "int8":
                whole = truth_logprobs(model, prompt, found.token_ids)
                assert (whole - expected).abs().max() > 2 * (torch.tensor(found.logprobs) - expected).abs().max()
