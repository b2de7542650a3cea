"""vLLM over two tensor-parallel ranks: each takes its part of a version, and the whole is the learner's. On a CPU."""

from __future__ import annotations

import asyncio

import torch

from actors.engines.base import EngineSpec
from actors.engines.vllm.engine import VllmEngine
from streamrl.messages import Sampling, VersionRef
from tests.unit.engines.tiny_models import document, request
from tests.unit.engines.vllm_harness import MAX_TOKENS, NEEDS_VLLM, Learner, character_tokenizer, model, save

pytestmark = NEEDS_VLLM


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
