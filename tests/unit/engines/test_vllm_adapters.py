"""The real vLLM with adapters: exact for every version, replaced under running sequences or kept for them."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import torch

from actors.engines.base import AdapterSpec, EngineSpec, TakesAdapters
from actors.engines.vllm.adapters import AdapterVllmEngine, lora_arguments, vllm_engine
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import VersionRef
from tests.unit.engines.test_native_adapters import SCALE, adapter_of, linears, with_adapter
from tests.unit.engines.test_vllm_engine import assert_equal
from tests.unit.engines.tiny_models import (
    character_tokenizer,
    document,
    prompt_of,
    request,
    truth_logprobs,
    two_model_logprobs,
)
from tests.unit.engines.vllm_harness import MAX_TOKENS, NEEDS_VLLM, SLOTS, EngineHarness, model, save

pytestmark = NEEDS_VLLM
V1, V2, V3 = (VersionRef(1, number) for number in (1, 2, 3))


def spec_of(path: Path, policy: str) -> EngineSpec:
    adapter = AdapterSpec(tuple(linears(model(0))), 3, SCALE)
    return EngineSpec(
        model_dir=path, tokenizer=character_tokenizer(), max_num_seqs=SLOTS, max_tokens=MAX_TOKENS,
        max_new_tokens=MAX_TOKENS, num_threads=1, install_policy=policy, adapter=adapter,
    )


class AdapterHarness(EngineHarness):
    def __init__(self, path: Path, policy: str) -> None:
        super().__init__(path, vllm_engine(spec_of(path, policy)))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"), 0)


async def start(engine) -> None:
    await engine.install_base(document(model(0)))
    await engine.install_adapter(adapter_of(model(0), 1), V1)


async def across_an_install(harness) -> list:
    """Three sequences of version 1, version 2 in their midst, then two more, one of which asks for version 1."""
    engine = harness.engine
    jobs = [asyncio.ensure_future(engine.generate(request(prompt_of(5, i), 120, seed=i))) for i in range(3)]
    await harness.under_way(20)
    await engine.install_adapter(adapter_of(model(0), 2), V2)
    late = [request(prompt_of(5, 0), 20, seed=7), request(prompt_of(5, 0), 20, seed=8, version=V1)]
    return [*await asyncio.gather(*jobs), *await asyncio.gather(*map(engine.generate, late))]


async def score_beside_sequences(harness) -> tuple[list, list[float]]:
    """Three sequences, and what a prompt scored while they ran."""
    jobs = [asyncio.ensure_future(harness.engine.generate(request(prompt_of(5, i), 60, seed=i))) for i in range(3)]
    await harness.under_way(20)
    scores = await harness.engine.score(prompt_of(9), start=1, temperature=1.0)
    return list(await asyncio.gather(*jobs)), scores


@pytest.mark.timeout(300)  # the engine starts twice
def test_running_sequences_switch_to_the_new_adapter_and_a_killed_core_comes_back_with_it(path):
    harness = AdapterHarness(path, "continue")
    engine, (old, new) = harness.engine, [with_adapter(model(0), adapter_of(model(0), seed)) for seed in (1, 2)]
    try:
        assert isinstance(engine, AdapterVllmEngine) and isinstance(engine, TakesAdapters)
        harness.run(start(engine))
        done, scores = harness.run(score_beside_sequences(harness))
        assert [len(one.token_ids) for one in done] == [60] * 3
        assert_equal(scores, truth_logprobs(old, prompt_of(9)[:1], prompt_of(9)[1:]))
        *running, fresh, asked = harness.run(across_an_install(harness))
        for i, done in enumerate(running):
            assert [span.ref for span in done.spans] == [V1, V2]
            switch = done.spans[0].end
            assert 20 <= switch < 120
            assert_equal(done.logprobs, two_model_logprobs(old, new, prompt_of(5, i), done.token_ids, switch=switch))
        for done in (fresh, asked):  # there is one adapter, and its prompt cache is not that of the one before
            assert [span.ref for span in done.spans] == [V2]
            assert_equal(done.logprobs, truth_logprobs(new, prompt_of(5, 0), done.token_ids))
        fewer = {name: t for name, t in adapter_of(model(0), 3).items() if "q_proj" not in name}
        with pytest.raises(WeightsError, match="q_proj"):
            harness.run(engine.install_adapter(fewer, V3))

        engine._core.group.terminate_all()
        with contextlib.suppress(EngineError):  # unless another core is there already
            harness.run(engine.generate(request(prompt_of(5), 5)))
        done = harness.run(engine.generate(request(prompt_of(5), 5)))
        assert [span.ref for span in done.spans] == [V2]
        assert_equal(done.logprobs, truth_logprobs(new, prompt_of(5), done.token_ids))
        scores = harness.run(engine.score(prompt_of(9), start=1, temperature=1.0))
        assert_equal(scores, truth_logprobs(new, prompt_of(9)[:1], prompt_of(9)[1:]))
    finally:
        harness.close()


def test_with_finish_running_sequences_keep_their_adapter_while_others_use_the_new_one(path):
    harness = AdapterHarness(path, "drain")
    engine, (old, new) = harness.engine, [with_adapter(model(0), adapter_of(model(0), seed)) for seed in (1, 2)]
    try:
        harness.run(start(engine))
        *running, fresh, asked = harness.run(across_an_install(harness))
        for i, done in enumerate(running):
            assert [(span.ref, span.end) for span in done.spans] == [(V1, 120)]
            assert_equal(done.logprobs, truth_logprobs(old, prompt_of(5, i), done.token_ids))
        assert [[span.ref for span in done.spans] for done in (fresh, asked)] == [[V2], [V1]]
        assert_equal(fresh.logprobs, truth_logprobs(new, prompt_of(5, 0), fresh.token_ids))
        assert_equal(asked.logprobs, truth_logprobs(old, prompt_of(5, 0), asked.token_ids))

        async def many() -> None:
            for number in range(3, 14):
                await engine.install_adapter(adapter_of(model(0), number), VersionRef(1, number))

        harness.run(many())
        folder = Path(engine._core.group.folder)
        assert len(list(folder.glob("adapter-*"))) == 8, "old versions leave nothing on disk"
        done = harness.run(engine.generate(request(prompt_of(5), 5, version=V1)))
        assert [span.ref for span in done.spans] == [VersionRef(1, 13)]
        newest = with_adapter(model(0), adapter_of(model(0), 13))
        assert_equal(done.logprobs, truth_logprobs(newest, prompt_of(5), done.token_ids))
    finally:
        harness.close()
    assert not folder.exists()


def test_the_room_is_for_the_rank_and_for_as_many_versions_as_serve_at_once():
    adapter = AdapterSpec(("layers.0.a", "layers.1.a", "layers.0.b"), 12, 1.0)

    assert lora_arguments(adapter, pinning=False)["max_lora_rank"] == 16
    assert lora_arguments(adapter, pinning=False)["lora_target_modules"] == ["a", "b"]
    assert lora_arguments(adapter, pinning=False)["max_loras"] == 1 < lora_arguments(adapter, pinning=True)["max_loras"]
    with pytest.raises(EngineError, match="up to rank 512"):
        lora_arguments(AdapterSpec(("a",), 1000, 1.0), pinning=False)


def test_what_vllm_computes_differs_between_the_versions_of_these_tests():
    old, new = [with_adapter(model(0), adapter_of(model(0), seed)) for seed in (1, 2)]
    ids = prompt_of(20)
    assert (truth_logprobs(old, ids[:1], ids[1:]) - truth_logprobs(new, ids[:1], ids[1:])).abs().max() > 0.05
    assert torch.isfinite(truth_logprobs(new, ids[:1], ids[1:])).all()
