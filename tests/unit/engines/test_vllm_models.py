"""The real vLLM on this CPU: a mixture, two tensor-parallel ranks, and the names and classes of it that we stand on."""

import asyncio

import pytest
import torch
from transformers import CONFIG_MAPPING

from actors.engines.base import EngineSpec
from actors.engines.native.weights import checkpoint_tensors
from actors.engines.vllm import imports as vllm_names
from actors.engines.vllm.engine import VllmEngine
from streamrl.architectures.miniature import build_miniature
from streamrl.errors import EngineError
from streamrl.messages import Sampling, VersionRef
from tests.unit.engines.tiny_models import character_tokenizer, document, request
from tests.unit.engines.vllm_harness import MAX_TOKENS, NEEDS_VLLM, EngineHarness, Learner, model, save

pytestmark = NEEDS_VLLM


def test_every_version_of_a_tied_mixture_is_served_as_the_learner_computes_it(tmp_path):
    config = CONFIG_MAPPING["olmoe"](tie_word_embeddings=True)
    models = [build_miniature(config, seed=seed, head_dim=32) for seed in range(3)]
    for seed, one in enumerate(models):
        one.save_pretrained(tmp_path / str(seed))
        character_tokenizer().save_pretrained(tmp_path / str(seed))
    harness = EngineHarness(tmp_path / "0", VllmEngine(EngineSpec(
        model_dir=tmp_path / "0", tokenizer=None, max_num_seqs=2, max_tokens=64, max_new_tokens=8, num_threads=1,
    )))
    ids = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(1)).tolist()

    async def scored(seed: int) -> list[float]:
        document = {name: tensor.detach() for name, tensor in checkpoint_tensors(models[seed]).items()}
        await harness.engine.install(document, VersionRef(1, seed + 1))
        return await harness.engine.score(ids, start=1, temperature=1.0)

    try:
        for seed in range(3):
            truth = Learner(tmp_path / str(seed)).logprobs(ids[:1], ids[1:])
            assert (torch.tensor(harness.run(scored(seed))) - truth).abs().max() < 1e-4
    finally:
        harness.close()


def test_each_rank_takes_its_part_of_every_version(tmp_path):
    paths = [save(tmp_path / str(seed), seed) for seed in (0, 1)]

    async def work() -> None:
        engine = VllmEngine(EngineSpec(
            model_dir=paths[0], tokenizer=character_tokenizer(), max_num_seqs=2, max_tokens=MAX_TOKENS,
            max_new_tokens=MAX_TOKENS, num_threads=1, options={"tensor_parallel_size": 2},
        ))
        try:
            for number, path in enumerate(paths):
                await engine.install(document(model(number)), VersionRef(1, number))
                prompt = [5, 6, 7, 8]
                done = await engine.generate(request(prompt, 12, sampling=Sampling()))
                truth = Learner(path).logprobs(prompt, done.token_ids)
                torch.testing.assert_close(torch.tensor(done.logprobs), truth, atol=2e-5, rtol=0)
                assert {span.ref for span in done.spans} == {VersionRef(1, number)}
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(work(), 380))


def test_vllm_has_all_names_and_what_moved_is_named_with_its_version(monkeypatch):
    vllm_names.check_names()  # all that are used, with their parameters
    monkeypatch.setitem(vllm_names.NAMES, "vllm.v1.engine.async_llm:AsyncLLM.pause_generation", ("mode", "gently"))
    monkeypatch.setitem(vllm_names.NAMES, "vllm.config:set_other_config", ())

    with pytest.raises(EngineError, match="pause_generation takes no gently.*set_other_config") as caught:
        vllm_names.check_names()

    assert vllm_names.vllm().version in str(caught.value)


def test_an_untied_model_is_refused_at_the_start_where_vllms_class_is_always_tied(tmp_path):
    build_miniature(CONFIG_MAPPING["gemma2"](tie_word_embeddings=False), head_dim=32).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"Gemma2ForCausalLM has no output layer .*tie_word_embeddings=false.*native"):
        VllmEngine(EngineSpec(model_dir=tmp_path, tokenizer=None, max_num_seqs=2, max_tokens=32, max_new_tokens=8))

    vllm_names.check_output_layer([
        "LlamaForCausalLM", "GemmaForCausalLM", "Gemma3ForCausalLM", "GPTNeoXForCausalLM", "OlmoeForCausalLM",
        "Gemma3nForConditionalGeneration", "NoSuchForCausalLM",
    ])
    for name in ("Gemma3nForCausalLM", "Cohere2ForCausalLM"):
        with pytest.raises(EngineError, match=name):
            vllm_names.check_output_layer(["LlamaForCausalLM", name])
