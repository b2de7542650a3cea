"""Adapters in the native engine: exact, several versions in one pass, and every token knows its own."""

import asyncio
import copy
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from actors.engines.base import AdapterSpec
from actors.engines.native.engine import NativeEngine
from actors.engines.native.forward import LayerShape, PromptRows, SlotCache
from actors.engines.native.weights import linear_weights, round_to_int8_
from actors.settings import engine_spec
from streamrl.config.load import load_config
from streamrl.errors import ConfigError, EngineError, WeightsError
from streamrl.weights.adapter import DOWN, UP, merged
from tests.unit.actors.fakes import V1 as PUBLISHED
from tests.unit.actors.test_probe import ProbedWeights, installed
from tests.unit.engines.tiny_models import (
    TIMEOUT_S,
    V1,
    V2,
    V3,
    GatedTokenizer,
    document,
    engine_for,
    llama,
    prompt_of,
    qwen3,
    request,
    truth_logprobs,
    two_model_logprobs,
    until,
)

pytestmark = pytest.mark.timeout(60)
SCALE = 4.0


class PacedTokenizer(GatedTokenizer):
    """After its gate, each decode waits until the test has something for the engine to do between two tokens."""

    def __init__(self, stop_at: int) -> None:
        super().__init__(stop_at)
        self.may_go = lambda: True

    def decode(self, ids, **options: object) -> str:
        text = super().decode(ids, **options)
        while not self.may_go():
            time.sleep(0.001)
        return text


def linears(model) -> dict[str, torch.nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}


def adapter_of(model, seed: int, rank: int = 3) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, layer in linears(model).items():
        found[name + DOWN] = 0.1 * torch.randn(rank, layer.in_features, generator=random)
        found[name + UP] = 0.1 * torch.randn(layer.out_features, rank, generator=random)
    return found


def with_adapter(model, adapter) -> torch.nn.Module:
    """The model that an adapter stands for, by transformers alone."""
    whole = copy.deepcopy(model)
    whole.load_state_dict(dict(merged(document(model), adapter, SCALE)), strict=False)
    return whole


@asynccontextmanager
async def adapted_engine(model, tokenizer=None, **options):
    """An engine with the base and version 1; the learner's adapters have the seeds of their numbers."""
    spec = AdapterSpec(tuple(linears(model)), 3, SCALE)
    empty = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    engine = NativeEngine(empty, tokenizer, max_num_seqs=4, max_tokens=128, adapter=spec, **options)
    try:
        await engine.install_base(document(model))
        await engine.install_adapter(adapter_of(model, 1), V1)
        yield engine
    finally:
        await engine.close()


async def across_an_install(engine, gate, tensors, prompt, *, late=()):
    """Install version 2 while a sequence stands at its tenth token; `late` requests join after it."""
    task = asyncio.create_task(engine.generate(request(prompt, 40, seed=5, stop=("never",))))
    await asyncio.to_thread(gate.reached.wait, TIMEOUT_S)
    install = asyncio.create_task(engine.install_adapter(tensors, V2))
    await until(lambda: len(engine._swaps) == 1)
    gate.go.set()
    await install
    others = await asyncio.gather(*(engine.generate(one) for one in late))
    return await task, others


def close(logprobs, expected) -> None:
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [qwen3, llama])
async def test_a_running_sequence_switches_to_the_new_adapter_between_two_tokens(make):
    model, prompt, gate = make(0), prompt_of(6), GatedTokenizer(stop_at=10)
    first, second = adapter_of(model, 1), adapter_of(model, 2)

    async with adapted_engine(model, gate) as engine:
        done, _ = await across_an_install(engine, gate, second, prompt)
        scores = await engine.score(prompt, start=1, temperature=1.0)
    old, new = with_adapter(model, first), with_adapter(model, second)
    assert [(s.ref, s.start, s.end) for s in done.spans] == [(V1, 0, 10), (V2, 10, 40)]
    close(done.logprobs, two_model_logprobs(old, new, prompt, done.token_ids, switch=10))
    close(scores, truth_logprobs(new, prompt[:1], prompt[1:]))


async def test_with_finish_a_sequence_ends_with_its_own_adapter_while_later_ones_use_the_new_one():
    model, prompt, gate = qwen3(0), prompt_of(6), GatedTokenizer(stop_at=10)
    first, second = adapter_of(model, 1), adapter_of(model, 2)
    late = [
        request(prompt, 20, seed=1), request(prompt_of(9, seed=2), 20, seed=2), request(prompt, 12, seed=3, version=V1),
    ]

    async with adapted_engine(model, gate, install_policy="drain") as engine:
        done, others = await across_an_install(engine, gate, second, prompt, late=late)
    old, new = with_adapter(model, first), with_adapter(model, second)
    assert [(s.ref, s.end) for s in done.spans] == [(V1, 40)], "it did not wait, and was not switched"
    close(done.logprobs, truth_logprobs(old, prompt, done.token_ids))
    assert [[(s.ref, s.end) for s in one.spans] for one in others] == [[(V2, 20)], [(V2, 20)], [(V1, 12)]]
    for one, asked, weights in zip(others, late, (new, new, old), strict=True):
        close(one.logprobs, truth_logprobs(weights, list(asked.prompt_ids), one.token_ids))


async def test_recompute_reads_running_sequences_again_with_the_new_adapter():
    model, prompt, gate = qwen3(0), prompt_of(6), GatedTokenizer(stop_at=10)
    second = adapter_of(model, 2)

    async with adapted_engine(model, gate, install_policy="recompute") as engine:
        done, _ = await across_an_install(engine, gate, second, prompt)
    close(done.logprobs[10:], truth_logprobs(with_adapter(model, second), prompt, done.token_ids)[10:])


async def test_an_old_adapter_stays_while_a_sequence_uses_it_and_then_goes():
    model, gate = qwen3(0), PacedTokenizer(stop_at=3)
    refs = [type(V1)(0, number) for number in range(2, 14)]

    async with adapted_engine(model, gate, install_policy="drain") as engine:
        running = asyncio.create_task(engine.generate(request(prompt_of(4), 30, stop=("never",))))
        await asyncio.to_thread(gate.reached.wait, TIMEOUT_S)
        installs = [asyncio.create_task(engine.install_adapter(adapter_of(model, 2), ref)) for ref in refs]
        await until(lambda: len(engine._swaps) == 1)
        gate.may_go = lambda: bool(engine._swaps) or all(one.done() for one in installs)  # it outlives them all
        gate.go.set()
        await asyncio.gather(*installs)
        done = await running
        assert [s.ref for s in done.spans] == [V1]
        still = await engine.generate(request(prompt_of(4), 5, version=V1))
        assert still.spans[0].ref == V1, "until the next version comes"
        await engine.install_adapter(adapter_of(model, 3), type(V1)(0, 20))
        gone = await engine.generate(request(prompt_of(4), 5, version=V1))
        assert gone.spans[0].ref == type(V1)(0, 20), "a version that is not there any more gives the newest"


async def test_an_adapter_of_other_layers_or_another_shape_is_refused_and_the_old_one_serves():
    model = qwen3(0)
    fewer = {name: t for name, t in adapter_of(model, 2).items() if "q_proj" not in name}
    name = next(n for n in adapter_of(model, 2) if n.endswith(UP))
    wrong = {**adapter_of(model, 2), name: torch.zeros(7, 3)}
    half = {n: t for n, t in adapter_of(model, 2).items() if n != name}

    async with adapted_engine(model) as engine:
        for tensors, said in ((fewer, "q_proj"), (wrong, "is for"), (half, "one is missing")):
            with pytest.raises(WeightsError, match=said):
                await engine.install_adapter(tensors, V3)
        assert engine.installed == V1
        done = await engine.generate(request(prompt_of(4), 5))
    close(done.logprobs, truth_logprobs(with_adapter(model, adapter_of(model, 1)), prompt_of(4), done.token_ids))


async def test_the_live_tensors_are_those_of_base_and_newest_adapter():
    model = qwen3(0)

    async with adapted_engine(model) as engine:
        await engine.install_adapter(adapter_of(model, 2), V2)
        live = engine.live_tensors()
    for name, tensor in {**document(model), **adapter_of(model, 2)}.items():
        assert torch.equal(live[name], tensor), name


def transcription(weight: torch.Tensor) -> torch.Tensor:
    rows = []
    for row in weight.tolist():
        scale = max(map(abs, row)) / 127
        rows.append([round(value / scale) * scale if scale else value for value in row])
    return torch.tensor(rows)


def test_a_matrix_is_rounded_as_int8_with_a_scale_for_each_row():
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    rounded = weight.clone()
    round_to_int8_(rounded)
    torch.testing.assert_close(rounded, transcription(weight), atol=1e-6, rtol=1e-6)
    assert max(len(row.unique()) for row in rounded) <= 255 and (rounded - weight).abs().max() > 1e-4
    again = rounded.clone()
    round_to_int8_(again)
    torch.testing.assert_close(again, rounded, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [qwen3, llama])
async def test_an_int8_engine_samples_from_the_rounded_model_and_installs_again(make):
    model = make()
    rounded = copy.deepcopy(model)
    names = linear_weights(rounded)
    assert len(names) == 2 * 7 and not any("head" in name or "embed" in name for name in names)
    with torch.no_grad():
        for name in names:
            rounded.get_parameter(name).copy_(transcription(model.get_parameter(name)))

    async with engine_for(model, weights="int8") as engine:
        for _ in range(2):  # the second install fills the spare tensors
            prompt = prompt_of(9)
            found = await engine.generate(request(prompt, 12))
            expected = truth_logprobs(rounded, prompt, found.token_ids)
            torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=1e-4)
            full = truth_logprobs(model, prompt, found.token_ids)
            assert 1e-3 < float((expected - full).abs().max()) < 0.5
            await engine.install(document(model), PUBLISHED)


def test_a_model_without_linear_layers_is_refused_where_int8_would_round_nothing():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=1))
    with pytest.raises(EngineError, match="GPT2LMHeadModel has none beside its output layer"):
        NativeEngine(model, None, max_num_seqs=1, max_tokens=32, weights="int8")


@pytest.mark.parametrize(("tolerance", "passes"), [(0.3, True), (1e-4, False)])
async def test_the_probe_compares_log_probs_and_no_bits(tolerance, passes):
    model = qwen3()

    async with engine_for(model, weights="int8", install=False) as engine:
        _, report = await installed(engine, ProbedWeights(model, tolerance=tolerance))
        assert report.ok and (report.probe.failed == "") is passes
        assert passes or "log-probs of the probe differ" in report.probe.failed


@pytest.mark.shows("actors.weights")
def test_the_setting_reaches_the_engine_and_is_refused_for_another(tmp_path):
    for value in ("full", "int8"):
        config = load_config(["experiment=quickstart", f"actors.weights={value}"])
        assert engine_spec(config, tmp_path, SimpleNamespace()).weights == value
    with pytest.raises(ConfigError, match="actors.weights=int8 is rounded by the native engine alone"):
        load_config(["experiment=quickstart", "actors.weights=int8", "actors.engine=vllm"])


CPU = torch.device("cpu")


def test_rows_take_memory_when_they_are_written_and_not_before() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = SlotCache([LayerShape(4, 64, 64)] * 4, slots=64, max_tokens=4096, dtype=torch.float32, device=CPU)
    assert cache.nbytes == 2**31
    assert process.memory_info().rss - before < 2**27
    rows = PromptRows.from_rows([[0, 1]], CPU)
    cache.put_prompts(3, rows, torch.ones(1, 4, 512, 64), torch.full((1, 4, 512, 64), 2.0))
    assert cache.keys[3][1, 2, 511].unique().tolist() == [1.0] and cache.values[3][0, 0, 0].unique().tolist() == [2.0]
    assert cache.keys[3][1, 2, 512:].count_nonzero() == 0 and cache.keys[3][2].count_nonzero() == 0


@pytest.mark.parametrize("rows", [[[2], [3], [4]], [[0, 1], [2, 3], [4, 5]], [[1], [3], [5]], [[0, 1], [2], [4, 5]]])
def test_each_prompt_is_in_its_rows_and_in_no_other(rows: list[list[int]]) -> None:
    cache = SlotCache([LayerShape(2, 8, 4)], slots=6, max_tokens=16, dtype=torch.float32, device=CPU)
    keys = torch.arange(1.0, 4.0)[:, None, None, None].expand(3, 2, 5, 8)
    cache.put_prompts(0, PromptRows.from_rows(rows, CPU), keys, 10 * keys[..., :4])
    expected = torch.zeros(6)
    for number, own in enumerate(rows, 1):
        expected[own] = number
    assert torch.equal(cache.keys[0][:, :, :5], expected[:, None, None, None].expand(6, 2, 5, 8))
    assert torch.equal(cache.values[0][:, :, :5], 10 * expected[:, None, None, None].expand(6, 2, 5, 4))
    assert not cache.keys[0][:, :, 5:].any() and not cache.values[0][:, :, 5:].any()


def test_tensors_of_a_cache_outlive_it_and_are_writable() -> None:
    cache = SlotCache([LayerShape(1, 8, 4)], slots=2, max_tokens=16, dtype=torch.bfloat16, device=CPU)
    keys, values = cache.keys[0], cache.values[0]
    del cache
    keys[1, 0, 15] = 3
    assert keys.shape == (2, 1, 16, 8) and values.shape == (2, 1, 16, 4)
    assert keys.sum().item() == 24 and values.sum().item() == 0
