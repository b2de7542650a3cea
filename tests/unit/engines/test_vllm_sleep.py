"""The real vLLM on this CPU in a run by turns. Only its allocator is a stand-in: CUDA's has no CPU build."""

import asyncio
import os
import signal
from dataclasses import replace

import msgspec
import pytest

from actors.engines.base import EngineSpec, GivesMemoryBack
from actors.engines.vllm.reaper import group_pids
from actors.weights.installer import Installer
from streamrl.errors import EngineError
from streamrl.messages import VersionRef
from tests.fakes.fake_vllm_sleep import FakeSleepAdapterVllm, FakeSleepVllm
from tests.unit.actors.test_probe import ProbedWeights
from tests.unit.engines.test_native_adapters import adapter_of, with_adapter
from tests.unit.engines.test_vllm_adapters import spec_of
from tests.unit.engines.test_vllm_engine import assert_equal
from tests.unit.engines.tiny_models import character_tokenizer, document, prompt_of, request, truth_logprobs
from tests.unit.engines.vllm_harness import MAX_TOKENS, NEEDS_VLLM, SLOTS, EngineHarness, model, save

pytestmark = NEEDS_VLLM
V1, V2, V3 = (VersionRef(1, number) for number in (1, 2, 3))
WAKES = ["wake weights", "load", "wake kv_cache"]


def sleepy(path) -> EngineHarness:
    return EngineHarness(path, FakeSleepVllm(EngineSpec(
        model_dir=path, tokenizer=character_tokenizer(), max_num_seqs=SLOTS, max_tokens=MAX_TOKENS,
        max_new_tokens=MAX_TOKENS, num_threads=1, takes_turns=True,
    )))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def harness(path):
    harness = sleepy(path)
    yield harness
    harness.close()


@pytest.fixture
def mortal(path):
    """An engine that a test may kill."""
    harness = sleepy(path)
    yield harness
    harness.close()


async def assert_serves(engine, seed: int, ref: VersionRef) -> None:
    job = request(prompt_of(7), 20, seed=3)
    done = await engine.generate(job)
    assert [span.ref for span in done.spans] == [ref]
    assert_equal(done.logprobs, truth_logprobs(model(seed), job.prompt_ids, done.token_ids))


def test_asleep_it_holds_nothing_and_the_next_version_wakes_weights_then_loads_then_wakes_the_cache(harness):
    async def work() -> None:
        engine = harness.engine
        assert isinstance(engine, GivesMemoryBack)
        await engine.release()  # random weights are given back too
        for number, seed in ((1, 0), (2, 1), (2, 1)):  # the last is the same version once more
            ref = VersionRef(1, number)
            await engine.told()
            await engine.install(document(model(seed)), ref)
            calls, held = await engine.told()
            assert calls == WAKES and held > sum(one.nbytes for one in document(model(seed)).values())
            await assert_serves(engine, seed, ref)
            await engine.release()
            assert await engine.told() == (["sleep 2"], 0) and engine.installed is None
            await engine.release()
            assert await engine.told() == ([], 0), "nothing is left"

    harness.run(work())


def test_sequences_that_run_or_wait_fail_and_later_ones_wait_for_the_version_that_wakes_it(harness):
    async def work() -> None:
        engine = harness.engine
        await engine.install(document(model(0)), V1)
        await engine.generate(request(prompt_of(7), 20, seed=3))  # its prompt is in the cache
        jobs = [asyncio.ensure_future(engine.generate(request(prompt_of(5, i), 240))) for i in range(SLOTS + 2)]
        while not (engine.stats().running == SLOTS and engine.stats().waiting == 2):
            await asyncio.sleep(0)
        await harness.under_way(2)
        await engine.release()
        for outcome in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "memory was released while this sequence" in str(outcome)
        late = asyncio.ensure_future(engine.generate(request(prompt_of(7), 20, seed=3)))
        await asyncio.sleep(0)
        await engine.install(document(model(1)), V2)
        done = await late
        assert [span.ref for span in done.spans] == [V2]
        assert_equal(done.logprobs, truth_logprobs(model(1), prompt_of(7), done.token_ids))
        assert engine.stats().running == engine.stats().waiting == 0

    harness.run(work())


def test_what_an_installer_wakes_it_with_is_verified_by_digests_and_by_the_probe(harness):
    async def work() -> None:
        engine, weights = harness.engine, ProbedWeights(model(0))
        manifest = weights.manifest(V1)
        await engine.release()
        installer = Installer(engine, weights.fetch)
        report = await installer.install(manifest, (), weights.layout)
        assert report.ok and report.probe.failed == "" and report.probe.mean < 1e-4
        await installer.release()
        assert await installer.check() is None, "there is nothing to compare"
        sound = bytes(weights.body)
        installer.document.tensors()["model.norm.weight"][3] += 1.0  # as damaged memory would be
        await engine.told()
        report = await installer.install(manifest, (), weights.layout)
        assert not report.ok and "has digest" in report.error and engine.installed is None
        assert await engine.told() == ([], 0), "what is damaged wakes nobody"
        weights.body[:] = sound
        report = await installer.install(manifest, (), weights.layout)
        assert report.ok and report.probe.failed == ""

        await installer.release()
        other = ProbedWeights(model(1))  # a probe that the document does not pass, as memory not loaded would not
        manifest = msgspec.structs.replace(weights.manifest(V2), probe=other.probe)
        report = await installer.install(manifest, (), weights.layout)
        assert "log-probs of the probe differ" in report.probe.failed

    harness.run(work())


@pytest.mark.parametrize("step", ["sleep 2", *WAKES])
def test_a_step_that_fails_ends_the_engine_with_the_cause(mortal, step):
    async def work() -> None:
        engine, weights = mortal.engine, ProbedWeights(model(0))
        installer = Installer(engine, weights.fetch)
        assert (await installer.install(weights.manifest(V1), (), weights.layout)).ok
        await engine.told(fails_at=step)
        with pytest.raises(EngineError, match=rf"FakeSleepLoader at {step}.*Restart this actor"):
            await installer.release()
            late = asyncio.ensure_future(engine.generate(request(prompt_of(5), 5)))
            await asyncio.sleep(0)
            try:
                await installer.install(weights.manifest(V2), (), weights.layout)
            finally:
                with pytest.raises(EngineError, match="Restart this actor"):
                    await late
        assert engine.stats().extra["dead"] and engine.installed is None

    mortal.run(work())


def test_a_core_that_is_killed_in_its_sleep_ends_the_engine_when_it_is_to_wake(mortal):
    async def work() -> None:
        engine = mortal.engine
        await engine.install(document(model(0)), V1)
        await engine.release()
        for pid in group_pids(engine._core.group.mark):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"did not wake up: vLLM's core (is dead|died).*Restart this actor"):
            await engine.install(document(model(1)), V2)
        with pytest.raises(EngineError, match="did not wake up"):
            await engine.release()

    mortal.run(work())


@pytest.mark.parametrize("policy", ["continue", "drain"])
def test_with_adapters_the_base_is_kept_on_the_host_and_wakes_without_another_start(path, policy):
    harness = EngineHarness(path, FakeSleepAdapterVllm(replace(spec_of(path, policy), takes_turns=True)))

    async def work() -> None:
        engine, base = harness.engine, document(model(0))
        await engine.release()  # before there is a base
        await engine.install_base(base)
        await engine.install_adapter(adapter_of(model(0), 1), V1)
        core = engine._core.llm
        for ref, seed in ((V2, 2), (V3, 3)):
            await engine.release()
            assert await engine.told() == (["sleep 1"], 0) and engine.installed is None
            await engine.install_base(base)
            await engine.release()  # a version that could not be taken leaves it half awake
            assert (await engine.told())[1] == 0
            await engine.install_base(base)
            assert engine.installed is None
            await engine.install_adapter(adapter_of(model(0), seed), ref)
            assert (await engine.told())[0] == ["wake weights", "wake kv_cache"] and engine._core.llm is core
            done = await engine.generate(request(prompt_of(5), 20, seed=4))
            assert [span.ref for span in done.spans] == [ref]
            truth = truth_logprobs(with_adapter(model(0), adapter_of(model(0), seed)), prompt_of(5), done.token_ids)
            assert_equal(done.logprobs, truth)

    try:
        harness.run(work())
    finally:
        harness.close()
