"""Adapters in the native engine: exact, several versions in one pass, and every token knows its own."""

from __future__ import annotations

import asyncio
import copy
import time
from contextlib import asynccontextmanager

import pytest
import torch

from actors.engines.base import AdapterSpec
from actors.engines.native.engine import NativeEngine
from streamrl.errors import WeightsError
from streamrl.weights.adapter import DOWN, UP, merged
from tests.unit.engines.tiny_models import (
    TIMEOUT_S,
    V1,
    V2,
    V3,
    GatedTokenizer,
    document,
    llama,
    prompt_of,
    qwen3,
    request,
    run,
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
def test_a_running_sequence_switches_to_the_new_adapter_between_two_tokens(make):
    model, prompt, gate = make(0), prompt_of(6), GatedTokenizer(stop_at=10)
    first, second = adapter_of(model, 1), adapter_of(model, 2)

    async def work():
        async with adapted_engine(model, gate) as engine:
            done, _ = await across_an_install(engine, gate, second, prompt)
            scores = await engine.score(prompt, start=1, temperature=1.0)
        old, new = with_adapter(model, first), with_adapter(model, second)
        assert [(s.ref, s.start, s.end) for s in done.spans] == [(V1, 0, 10), (V2, 10, 40)]
        close(done.logprobs, two_model_logprobs(old, new, prompt, done.token_ids, switch=10))
        close(scores, truth_logprobs(new, prompt[:1], prompt[1:]))

    run(work)


def test_with_finish_a_sequence_ends_with_its_own_adapter_while_later_ones_use_the_new_one():
    model, prompt, gate = qwen3(0), prompt_of(6), GatedTokenizer(stop_at=10)
    first, second = adapter_of(model, 1), adapter_of(model, 2)
    late = [
        request(prompt, 20, seed=1), request(prompt_of(9, seed=2), 20, seed=2), request(prompt, 12, seed=3, version=V1),
    ]

    async def work():
        async with adapted_engine(model, gate, install_policy="drain") as engine:
            done, others = await across_an_install(engine, gate, second, prompt, late=late)
        old, new = with_adapter(model, first), with_adapter(model, second)
        assert [(s.ref, s.end) for s in done.spans] == [(V1, 40)], "it did not wait, and was not switched"
        close(done.logprobs, truth_logprobs(old, prompt, done.token_ids))
        assert [[(s.ref, s.end) for s in one.spans] for one in others] == [[(V2, 20)], [(V2, 20)], [(V1, 12)]]
        for one, asked, weights in zip(others, late, (new, new, old), strict=True):
            close(one.logprobs, truth_logprobs(weights, list(asked.prompt_ids), one.token_ids))

    run(work)


def test_recompute_reads_running_sequences_again_with_the_new_adapter():
    model, prompt, gate = qwen3(0), prompt_of(6), GatedTokenizer(stop_at=10)
    second = adapter_of(model, 2)

    async def work():
        async with adapted_engine(model, gate, install_policy="recompute") as engine:
            done, _ = await across_an_install(engine, gate, second, prompt)
        close(done.logprobs[10:], truth_logprobs(with_adapter(model, second), prompt, done.token_ids)[10:])

    run(work)


def test_an_old_adapter_stays_while_a_sequence_uses_it_and_then_goes():
    model, gate = qwen3(0), PacedTokenizer(stop_at=3)
    refs = [type(V1)(0, number) for number in range(2, 14)]

    async def work():
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

    run(work)


def test_an_adapter_of_other_layers_or_another_shape_is_refused_and_the_old_one_serves():
    model = qwen3(0)
    fewer = {name: t for name, t in adapter_of(model, 2).items() if "q_proj" not in name}
    name = next(n for n in adapter_of(model, 2) if n.endswith(UP))
    wrong = {**adapter_of(model, 2), name: torch.zeros(7, 3)}
    half = {n: t for n, t in adapter_of(model, 2).items() if n != name}

    async def work():
        async with adapted_engine(model) as engine:
            for tensors, said in ((fewer, "q_proj"), (wrong, "is for"), (half, "one is missing")):
                with pytest.raises(WeightsError, match=said):
                    await engine.install_adapter(tensors, V3)
            assert engine.installed == V1
            done = await engine.generate(request(prompt_of(4), 5))
        close(done.logprobs, truth_logprobs(with_adapter(model, adapter_of(model, 1)), prompt_of(4), done.token_ids))

    run(work)


def test_the_live_tensors_are_those_of_base_and_newest_adapter():
    model = qwen3(0)

    async def work():
        async with adapted_engine(model) as engine:
            await engine.install_adapter(adapter_of(model, 2), V2)
            live = engine.live_tensors()
        for name, tensor in {**document(model), **adapter_of(model, 2)}.items():
            assert torch.equal(live[name], tensor), name

    run(work)
