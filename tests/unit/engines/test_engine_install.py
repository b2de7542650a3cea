"""Weights change between two forward passes: all of them or none, and every token knows which it came from."""

import asyncio

import pytest
import torch

from actors.engines.native.weights import WeightSets, checkpoint_tensors
from streamrl.errors import WeightsError
from tests.unit.engines.tiny_models import (
    GREEDY,
    V1,
    V2,
    V3,
    GatedTokenizer,
    assert_logprobs,
    document,
    engine_for,
    llama,
    prompt_of,
    qwen3,
    request,
    truth_greedy,
    truth_logprobs,
    two_model_logprobs,
    until,
)

pytestmark = pytest.mark.timeout(60)


async def generate_across_an_install(engine, gate, tensors, *, prompt, new, crowd=()):
    """Install while the sequence stands between two tokens of its own; returns its generation and the install times."""
    others = [asyncio.create_task(engine.generate(r)) for r in crowd]
    task = asyncio.create_task(engine.generate(request(prompt, new, seed=5, stop=("never",))))
    await asyncio.to_thread(gate.reached.wait)
    install = asyncio.create_task(engine.install(tensors, V2))
    await until(lambda: len(engine._swaps) == 1)
    gate.go.set()
    return await task, await install, await asyncio.gather(*others)


@pytest.mark.parametrize("make", [qwen3, llama])
async def test_a_running_sequence_keeps_its_tokens_and_cache_and_goes_on_with_the_new_weights(make):
    old, new, prompt = make(0), make(1), prompt_of(6)
    gate = GatedTokenizer(stop_at=10)

    async with engine_for(old, gate) as engine:
        generation, times, _ = await generate_across_an_install(
            engine, gate, document(new), prompt=prompt, new=40
        )
        assert engine.installed == V2

    assert [(s.ref, s.start, s.end) for s in generation.spans] == [(V1, 0, 10), (V2, 10, 40)]
    assert 0.0 <= times.pause_s <= times.install_s
    expected = two_model_logprobs(old, new, prompt, generation.token_ids, switch=10)
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=1e-5)
    # The recorded numbers are not those of the new weights on a fresh cache: nothing could recompute them.
    fresh = truth_logprobs(new, prompt, generation.token_ids)[10:]
    assert (torch.tensor(generation.logprobs)[10:] - fresh).abs().max() > 1e-3


async def test_with_recompute_later_logprobs_are_those_of_the_new_weights_alone():
    old, new, prompt = qwen3(0), qwen3(1), prompt_of(6)
    gate = GatedTokenizer(stop_at=10)
    crowd = [request(prompt_of(3 + 9 * n, seed=n), 50, seed=n) for n in range(4)]

    async with engine_for(old, gate, max_num_seqs=5, install_policy="recompute", prefill_tokens=40) as engine:
        generation, _, others = await generate_across_an_install(
            engine, gate, document(new), prompt=prompt, new=40, crowd=crowd
        )
    runs = [(prompt, generation), *((list(r.prompt_ids), g) for r, g in zip(crowd, others, strict=True))]
    for text, done in runs:
        assert [s.ref for s in done.spans] == [V1, V2]
        switch = done.spans[0].end
        expected = torch.cat([
            truth_logprobs(old, text, done.token_ids)[:switch], truth_logprobs(new, text, done.token_ids)[switch:],
        ])  # fmt: skip
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-5, rtol=1e-5)


async def test_with_drain_no_sequence_sees_two_versions():
    old, new = qwen3(0), qwen3(1)
    gate = GatedTokenizer(stop_at=10)

    async with engine_for(old, gate, max_num_seqs=3, install_policy="drain") as engine:
        running = asyncio.create_task(engine.generate(request(prompt_of(6), 30, stop=("never",))))
        await asyncio.to_thread(gate.reached.wait)
        late = [asyncio.create_task(engine.generate(request(prompt_of(4, seed=n), 20))) for n in range(3)]
        await asyncio.sleep(0)  # they are in line before the install is
        install = asyncio.create_task(engine.install(document(new), V2))
        await until(lambda: len(engine._swaps) == 1)
        gate.go.set()
        first, *others, _ = await asyncio.gather(running, *late, install)

    assert [(s.ref, s.start, s.end) for s in first.spans] == [(V1, 0, 30)]
    for n, generation in enumerate(others):
        assert [span.ref for span in generation.spans] == [V2]
        assert_logprobs(new, prompt_of(4, seed=n), generation)


async def test_an_install_that_is_given_up_before_its_turn_never_happens():
    old, new = qwen3(0), qwen3(1)
    gate = GatedTokenizer(stop_at=5)

    async with engine_for(old, gate, install_policy="drain") as engine:
        running = asyncio.create_task(engine.generate(request(prompt_of(6), 30, stop=("never",))))
        await asyncio.to_thread(gate.reached.wait)
        install = asyncio.create_task(engine.install(document(new), V2))
        await until(lambda: len(engine._swaps) == 1)
        install.cancel()
        with pytest.raises(asyncio.CancelledError):
            await install
        gate.go.set()
        await running
        after = await engine.generate(request(prompt_of(6), 10))
        assert [span.ref for span in after.spans] == [V1]
        await engine.install(document(new), V3)
        assert engine.installed == V3


async def test_versions_installed_before_a_token_was_sampled_leave_no_span():
    model = qwen3()

    async with engine_for(model) as engine:
        await engine.install(document(model), V2)
        await engine.install(document(qwen3(3)), V3)
        generation = await engine.generate(request(prompt_of(4), 5, sampling=GREEDY))
    assert [span.ref for span in generation.spans] == [V3]
    assert generation.token_ids == truth_greedy(qwen3(3), prompt_of(4), 5)


async def test_the_same_weights_again_change_no_number():
    model, prompt = qwen3(), prompt_of(6)
    gate = GatedTokenizer(stop_at=10)

    async with engine_for(model, gate) as engine:
        crossed, _, _ = await generate_across_an_install(engine, gate, document(model), prompt=prompt, new=40)
        undisturbed = await engine.generate(request(prompt, 40, seed=5))
    assert len(crossed.spans) == 2
    assert crossed.token_ids == undisturbed.token_ids
    assert crossed.logprobs == undisturbed.logprobs


async def test_a_sibling_that_comes_after_an_install_does_not_reuse_the_old_cache():
    old, new, prompt = qwen3(0), qwen3(1), prompt_of(6)
    gate = GatedTokenizer(stop_at=3)

    async with engine_for(old, gate) as engine:
        task = asyncio.create_task(engine.generate(request(prompt, 200, stop=("never",))))
        await asyncio.to_thread(gate.reached.wait)
        install = asyncio.create_task(engine.install(document(new), V2))
        await until(lambda: len(engine._swaps) == 1)
        late = asyncio.create_task(engine.generate(request(prompt, 20, seed=9)))
        gate.go.set()
        await install
        sibling = await late
        task.cancel()
    assert [span.ref for span in sibling.spans] == [V2]
    assert_logprobs(new, prompt, sibling)


def spoiled(kind: str) -> dict[str, torch.Tensor]:
    tensors = document(qwen3(1))
    name = "model.layers.1.mlp.up_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "shape":
        tensors[name] = tensors[name].T.contiguous()
    elif kind == "type":
        tensors[name] = tensors[name].to(torch.int32)
    else:
        tensors["model.layers.1.mlp.up_proj.weight_scale"] = torch.ones(1)
    return tensors


@pytest.mark.parametrize("kind", ["missing", "shape", "type", "unknown"])
async def test_a_document_that_does_not_fit_is_refused_by_name_and_the_old_version_serves(kind):
    model, prompt = qwen3(), prompt_of(5)

    async with engine_for(model) as engine:
        before = await engine.generate(request(prompt, 20, seed=1))
        with pytest.raises(WeightsError, match="model.layers.1.mlp.up_proj.weight"):
            await engine.install(spoiled(kind), V2)
        assert engine.installed == V1
        after = await engine.generate(request(prompt, 20, seed=1))
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
        await engine.install(document(qwen3(1)), V2)
        assert engine.installed == V2


def test_tied_weights_stay_tied_and_their_copy_is_not_in_the_document():
    model, other = qwen3(0), qwen3(1)
    assert "lm_head.weight" not in document(model)

    sets = WeightSets(model)
    sets.swap(sets.stage(document(other)))

    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(model.lm_head.weight, other.lm_head.weight, atol=0, rtol=0)


def test_untied_heads_and_norms_are_all_exchanged():
    model, other = qwen3(0, tied=False), qwen3(1, tied=False)
    other.model.norm.weight.data.mul_(1.5)
    sets = WeightSets(model)

    sets.swap(sets.stage(document(other)))

    for name, tensor in checkpoint_tensors(model).items():
        torch.testing.assert_close(tensor, other.state_dict()[name], atol=0, rtol=0)


def test_staging_leaves_the_live_weights_alone_and_a_swap_keeps_two_sets_at_most():
    model = llama(0)
    before, sets = document(model), WeightSets(model)
    pointers = set()

    for seed in range(1, 6):
        staged = sets.stage(document(llama(seed)))
        for name, tensor in checkpoint_tensors(model).items():
            torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)
        sets.swap(staged)
        before = document(model)
        pointers.add(model.lm_head.weight.data_ptr())

    assert len(pointers) == 2


async def test_weights_that_give_no_finite_number_fail_the_sequence_and_leave_no_trace():
    model, prompt = qwen3(), prompt_of(6)
    broken = document(model)
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], float("nan"))
    poisoned = document(model)
    name = "model.layers.0.self_attn.v_proj.weight"
    poisoned[name] = torch.full_like(poisoned[name], float("inf"))

    async with engine_for(model, max_num_seqs=2) as engine:
        for version, tensors in ((V2, broken), (V3, poisoned)):
            await engine.install(tensors, version)
            results = await asyncio.gather(
                *(engine.generate(request(prompt_of(40), 20, seed=n)) for n in range(2)), return_exceptions=True
            )
            assert all("not finite" in str(error) for error in results)
        await engine.install(document(model), V3)
        # Rows that held NaN are used again, behind shorter sequences.
        done = await asyncio.gather(*(engine.generate(request(prompt, 10, seed=n)) for n in range(2)))
        assert engine.stats().extra["nonfinite"] == 4.0
    for generation in done:
        assert_logprobs(model, prompt, generation)
