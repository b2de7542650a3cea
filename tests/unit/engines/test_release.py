"""An engine that leaves its memory to others for a while: what it gives back, and what it is afterwards."""

import asyncio

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.base import GivesMemoryBack
from actors.weights.installer import Installer
from streamrl.errors import EngineError
from streamrl.process_memory import keep_freed_memory
from tests.unit.actors.test_probe import ProbedWeights
from tests.unit.engines.tiny_models import (
    GREEDY,
    V1,
    V2,
    document,
    engine_for,
    llama,
    prompt_of,
    qwen3,
    request,
    truth_greedy,
)

pytestmark = pytest.mark.timeout(60)


def wide_llama() -> torch.nn.Module:
    """A model of 50 MB, which shows in the memory of a process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
    )).eval()


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("weights", ["full", "int8"])
async def test_each_release_takes_at_least_the_weights_out_of_the_resident_set(weights):
    keep_freed_memory()  # as an actor does: what is freed would stay otherwise
    model = wide_llama()
    tensors = document(model)
    nbytes = sum(one.nbytes for one in tensors.values())
    assert nbytes > 40e6
    prompt = prompt_of(9)

    async with engine_for(model, weights=weights, max_num_seqs=8) as engine:
        assert isinstance(engine, GivesMemoryBack)
        before_first = await engine.generate(request(prompt, 12, sampling=GREEDY))
        for version in (V2, V1, V2):
            held = resident()
            await engine.release()
            assert held - resident() >= nbytes, f"{held - resident()} of {nbytes} bytes"
            assert engine.installed is None and engine.stats().extra["kv_cache_bytes"] == 0
            await engine.release()  # nothing is left
            await engine.install(tensors, version)
            again = await engine.generate(request(prompt, 12, sampling=GREEDY))
            assert again.token_ids == before_first.token_ids and again.spans[0].ref == version


@pytest.mark.parametrize("make", [qwen3, llama])
async def test_an_engine_that_woke_generates_from_what_it_was_given_then(make):
    old, new = make(0), make(1)
    prompt = prompt_of(7)
    async with engine_for(old) as engine:
        await engine.install(document(old), V1)  # both sets are in use
        await engine.release()
        waits = asyncio.ensure_future(engine.generate(request(prompt, 9, sampling=GREEDY)))
        await asyncio.sleep(0)
        await engine.install(document(new), V2)
        assert (await waits).token_ids == truth_greedy(new, prompt, 9)
        live = engine.live_tensors()
        assert all(torch.equal(live[name], tensor) for name, tensor in document(new).items())


async def test_sequences_that_run_or_wait_end_with_an_error_and_the_engine_goes_on():
    model = qwen3()
    async with engine_for(model, max_num_seqs=1) as engine:
        jobs = [asyncio.ensure_future(engine.generate(request(prompt_of(5), 200))) for _ in range(2)]
        while not (engine.stats().running and engine.stats().waiting):
            await asyncio.sleep(0)
        await engine.release()
        for outcome in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "memory was released" in str(outcome)
        await engine.install(document(model), V2)
        assert (await engine.generate(request(prompt_of(5), 9, sampling=GREEDY))).token_ids == truth_greedy(
            model, prompt_of(5), 9
        )


async def test_what_an_installer_wakes_the_engine_with_is_verified_and_probed():
    model = qwen3()
    weights = ProbedWeights(model)
    async with engine_for(model, install=False) as engine:
        installer, manifest = Installer(engine, weights.fetch), weights.manifest(V1)
        assert (await installer.install(manifest, (), weights.layout)).ok
        await installer.release()
        assert engine.installed is None and await installer.check() is None, "there is nothing to compare"
        report = await installer.install(manifest, (), weights.layout)
        assert report.ok and report.probe.failed == "" and engine.installed == V1

        await installer.release()
        sound = bytes(weights.body)
        installer.document.tensors()["model.norm.weight"][3] += 1.0  # as damaged memory would be
        report = await installer.install(manifest, (), weights.layout)
        assert not report.ok and "has digest" in report.error and engine.installed is None
        weights.body[:] = sound  # the transport's copy; the actor's own is not asked again
        report = await installer.install(manifest, (), weights.layout)
        assert report.ok and report.probe.failed == "" and engine.installed == V1
