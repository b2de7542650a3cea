"""The real vLLM on this CPU: what it says of its tokens is what the learner says, whatever is installed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import count

import pytest
import torch

from actors.engines.native.engine import NativeEngine
from actors.engines.vllm import core as vllm_core
from actors.engines.vllm import engine as vllm_engine
from actors.engines.vllm.process import StagedDocument
from actors.engines.vllm.reaper import family
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import Sampling, VersionRef
from tests.unit.engines.tiny_models import (
    GREEDY,
    character_tokenizer,
    document,
    prompt_of,
    request,
    truth_logprobs,
    two_model_logprobs,
    until,
)
from tests.unit.engines.vllm_harness import MAX_TOKENS, NEEDS_VLLM, SLOTS, Learner, Theatre, model, save

pytestmark = NEEDS_VLLM
MOST, MEAN = 1e-3, 1e-4
VERSIONS = count(1)


@pytest.fixture(scope="module")
def theatre(tmp_path_factory) -> Theatre:
    theatre = Theatre(save(tmp_path_factory.mktemp("model"), 0))
    yield theatre
    theatre.close()


def version() -> VersionRef:
    return VersionRef(1, next(VERSIONS))


async def serve(theatre: Theatre, seed: int) -> VersionRef:
    """Install the model of this seed as the next version."""
    ref = version()
    await theatre.engine.install(document(model(seed)), ref)
    return ref


def assert_equal(logprobs, truth: torch.Tensor) -> None:
    difference = (torch.tensor(list(logprobs)) - truth).abs()
    assert difference.max() <= MOST and difference.mean() <= MEAN


def test_logprobs_are_the_learners_before_and_after_each_of_five_updates_in_flight(theatre, tmp_path):
    learners = [Learner(save(tmp_path / str(seed), seed)) for seed in range(6)]

    async def compare(seed: int) -> None:
        for temperature in (1.0, 0.6):
            sampling = Sampling(temperature=temperature)
            jobs = [request(prompt_of(3 + i, i), 24, seed=i, sampling=sampling) for i in range(6)]
            for job, done in zip(jobs, await asyncio.gather(*map(theatre.engine.generate, jobs)), strict=True):
                assert_equal(done.logprobs, learners[seed].logprobs(job.prompt_ids, done.token_ids, temperature))

    async def whole() -> None:
        await serve(theatre, 0)
        await compare(0)
        for seed in range(1, 6):
            old = theatre.engine.installed
            jobs = [request(prompt_of(5, 10 + i), 120, seed=i) for i in range(3)]
            tasks = [asyncio.ensure_future(theatre.engine.generate(job)) for job in jobs]
            await theatre.under_way(20)
            new = await serve(theatre, seed)
            for job, done in zip(jobs, await asyncio.gather(*tasks), strict=True):
                assert [span.ref for span in done.spans] == [old, new]
                switch = done.spans[0].end
                assert 20 <= switch < 120 and done.spans[1].end == len(done.token_ids) == 120
                told = learners[seed - 1].logprobs(job.prompt_ids, done.token_ids[:switch])
                assert_equal(done.logprobs[:switch], told)
                # Later tokens see the cache that the old weights left behind: that is what they were drawn from.
                both = two_model_logprobs(model(seed - 1), model(seed), job.prompt_ids, done.token_ids, switch)
                assert_equal(done.logprobs, both)
            await compare(seed)

    theatre.run(whole())


def test_greedy_tokens_are_the_native_engines(theatre):
    jobs = [request(prompt_of(4 + 3 * i, i), 32, sampling=GREEDY) for i in range(8)]

    async def whole() -> None:
        ref = await serve(theatre, 3)
        native = NativeEngine(model(0), None, max_num_seqs=SLOTS, max_tokens=MAX_TOKENS, num_threads=1)
        try:
            await native.install(document(model(3)), ref)
            for ours, theirs in zip(
                await asyncio.gather(*map(native.generate, jobs)),
                await asyncio.gather(*map(theatre.engine.generate, jobs)), strict=True,
            ):
                assert ours == theirs
        finally:
            await native.close()

    theatre.run(whole())


def test_the_same_weights_again_change_no_number(theatre):
    job = request(prompt_of(6), 200, seed=3)

    async def whole() -> None:
        first = await serve(theatre, 4)
        before = await theatre.engine.generate(job)
        running = asyncio.ensure_future(theatre.engine.generate(job))
        await theatre.under_way(10)
        second = await serve(theatre, 4)
        across, after = await running, await theatre.engine.generate(job)
        for other in (across, after):
            assert (other.token_ids, other.logprobs) == (before.token_ids, before.logprobs)
        assert [span.ref for span in across.spans] == [first, second] and after.spans[0].ref == second

    theatre.run(whole())


def test_given_tokens_are_scored_like_the_learner_scores_them(theatre, tmp_path):
    learner = Learner(save(tmp_path, 5))
    ids = prompt_of(MAX_TOKENS)

    async def whole() -> None:
        await serve(theatre, 5)
        assert_equal(await theatre.engine.score(ids, start=1, temperature=1.0), learner.logprobs(ids[:1], ids[1:]))
        with pytest.raises(EngineError, match="temperature=0.5"):
            await theatre.engine.score(ids, start=1, temperature=0.5)

    theatre.run(whole())


def test_given_tokens_are_scored_at_once_though_every_slot_is_taken_and_more_sequences_wait(theatre):
    engine = theatre.engine

    async def whole() -> None:
        await serve(theatre, 5)
        jobs = [request(prompt_of(5), 240, seed=seed) for seed in range(SLOTS + 2)]
        tasks = [asyncio.ensure_future(engine.generate(job)) for job in jobs]
        await theatre.under_way(3)
        assert len(await engine.score(prompt_of(20), start=1, temperature=1.0)) == 19
        assert (engine.stats().running, engine.stats().waiting) == (SLOTS, 2), "none of them has ended"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    theatre.run(whole())


def test_with_recompute_later_logprobs_are_those_of_the_new_weights_alone(theatre):
    job = request(prompt_of(9), 200, seed=1)

    async def whole() -> None:
        await serve(theatre, 1)
        running = asyncio.ensure_future(theatre.engine.generate(job))
        await theatre.under_way(10)
        new = await serve(theatre, 2)
        done = await running
        assert done.spans[1].ref == new
        switch = done.spans[0].end
        truths = [truth_logprobs(model(seed), job.prompt_ids, done.token_ids) for seed in (1, 2)]
        assert_equal(done.logprobs, torch.cat([truths[0][:switch], truths[1][switch:]]))

    with theatre.policy("recompute"):
        theatre.run(whole())


def test_with_finish_no_sequence_sees_two_versions_and_none_begins_before_the_install(theatre):
    async def whole() -> None:
        old = await serve(theatre, 1)
        jobs = [request(prompt_of(5, i), 150, seed=i) for i in range(3)]
        running = [asyncio.ensure_future(theatre.engine.generate(job)) for job in jobs]
        await theatre.under_way(5)
        assert not theatre.engine.stats().blocked
        install = asyncio.ensure_future(serve(theatre, 2))
        await until(lambda: not theatre.engine._open.is_set())  # staged, and the door is closed
        await until(lambda: theatre.engine.stats().blocked or install.done())
        assert not install.done(), "it said all the while that it was waiting for sequences"
        late = asyncio.ensure_future(theatre.engine.generate(request(prompt_of(5), 8)))
        new = await install
        assert all(task.done() for task in running)
        assert [span.ref for task in running for span in (await task).spans] == [old] * 3
        assert [span.ref for span in (await late).spans] == [new]
        assert not theatre.engine.stats().blocked

    with theatre.policy("drain"):
        theatre.run(whole())


def test_a_prompt_read_under_old_weights_is_not_reused_under_new_ones(theatre):
    prompt = prompt_of(200)

    async def whole() -> None:
        for seed in (1, 2):
            await serve(theatre, seed)
            for _ in range(2):  # the second one may reuse what the first one left in the cache
                done = await theatre.engine.generate(request(prompt, 16, seed=4))
                assert_equal(done.logprobs, truth_logprobs(model(seed), prompt, done.token_ids))

    theatre.run(whole())


def spoiled(kind: str) -> dict[str, torch.Tensor]:
    tensors = document(model(2))
    name = list(tensors)[5]
    if kind == "missing":
        del tensors[name]
    elif kind == "unknown":
        tensors["model.extra"] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(3, 3)
    return tensors


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape"])
def test_a_document_that_does_not_fit_is_refused_by_name_and_the_old_version_serves(theatre, kind):
    async def whole() -> None:
        old = await serve(theatre, 1)
        with pytest.raises(WeightsError, match="model.extra|layers.0"):
            await theatre.engine.install(spoiled(kind), version())
        done = await theatre.engine.generate(request(prompt_of(5), 24))
        assert done.spans[0].ref == old == theatre.engine.installed
        assert_equal(done.logprobs, truth_logprobs(model(1), prompt_of(5), done.token_ids))

    theatre.run(whole())


def test_a_load_that_fails_halfway_is_undone_and_running_sequences_never_notice(theatre, monkeypatch):
    class Torn(StagedDocument):
        """Says of a tensor in the middle that it is larger than it is; the tensors before it are loaded by then."""

        torn = False

        def __init__(self, tensors) -> None:
            super().__init__(tensors)
            if not Torn.torn:
                Torn.torn = True
                place = len(self.entries) // 2
                name, dtype, shape, _ = self.entries[place]
                self.entries[place] = (name, dtype, [size * 1000 for size in shape], 0)

    job = request(prompt_of(5), 200, seed=2)

    async def whole() -> None:
        old = await serve(theatre, 1)
        running = asyncio.ensure_future(theatre.engine.generate(job))
        await theatre.under_way(10)
        monkeypatch.setattr(vllm_engine, "StagedDocument", Torn)
        with pytest.raises(WeightsError, match=f"failed to load version 1:.*, {old} serves on"):
            await serve(theatre, 2)
        for done in (await running, await theatre.engine.generate(job)):
            assert {span.ref for span in done.spans} == {old}
            assert_equal(done.logprobs, truth_logprobs(model(1), job.prompt_ids, done.token_ids))
        assert theatre.engine.stats().extra["revivals"] == 0

    theatre.run(whole())


def test_a_load_that_cannot_be_undone_costs_the_running_sequences_and_a_core_but_not_the_old_version(
    theatre, monkeypatch
):
    class Torn(StagedDocument):
        """The load fails halfway, and so does the one that is to undo it; the fresh core's does not."""

        left = 2

        def __init__(self, tensors) -> None:
            super().__init__(tensors)
            if Torn.left:
                Torn.left -= 1
                place = len(self.entries) // 2
                name, dtype, shape, _ = self.entries[place]
                self.entries[place] = (name, dtype, [size * 1000 for size in shape], 0)

    job = request(prompt_of(5), 200, seed=2)

    async def whole() -> None:
        old = await serve(theatre, 1)
        revivals = theatre.engine.stats().extra["revivals"]
        running = asyncio.ensure_future(theatre.engine.generate(job))
        await theatre.under_way(10)
        for module in (vllm_engine, vllm_core):
            monkeypatch.setattr(module, "StagedDocument", Torn)
        with pytest.raises(WeightsError, match=f"{old} serves on"):
            await serve(theatre, 2)
        with pytest.raises(EngineError, match="core died"):
            await running  # vLLM would never have answered
        done = await theatre.engine.generate(job)
        assert {span.ref for span in done.spans} == {old}
        assert_equal(done.logprobs, truth_logprobs(model(1), job.prompt_ids, done.token_ids))
        assert theatre.engine.stats().extra["revivals"] == revivals + 1

    theatre.run(whole())


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd_and_another_turn_others(theatre):
    job, longer = request(prompt_of(7), 40, seed=9), request([*prompt_of(7), 5], 40, seed=9)
    crowd = [request(prompt_of(3 + i, i), 30 + i, seed=i) for i in range(SLOTS)]

    async def whole() -> None:
        await serve(theatre, 0)
        alone = await theatre.engine.generate(job)
        among, turn, *_ = await asyncio.gather(*map(theatre.engine.generate, [job, longer, *crowd]))
        assert among.token_ids == alone.token_ids != turn.token_ids

    theatre.run(whole())


def test_end_tokens_and_stop_strings_end_a_sequence_and_are_kept(theatre):
    jobs = [request(prompt_of(5, i), 100, seed=i, ignore_eos=False) for i in range(SLOTS)]
    text = character_tokenizer().decode

    async def whole() -> None:
        await serve(theatre, 0)
        ended = await asyncio.gather(*map(theatre.engine.generate, jobs))
        assert {done.finish for done in ended} >= {"stop"}
        for done in ended:
            assert (done.token_ids.index(1) if 1 in done.token_ids else 99) == len(done.token_ids) - 1
            assert done.finish == ("stop" if done.token_ids[-1] == 1 else "length")
        free = await theatre.engine.generate(request(prompt_of(5), 60, seed=7))
        stop = text(free.token_ids)[20:22]
        stopped = await theatre.engine.generate(request(prompt_of(5), 60, seed=7, stop=(stop,)))
        assert stopped.finish == "stop" and free.finish == "length"
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        assert text(stopped.token_ids).endswith(stop) and stop not in text(stopped.token_ids[:-1])
        assert stopped.logprobs == free.logprobs[: len(stopped.token_ids)]

    theatre.run(whole())


def test_a_cancelled_sequence_gives_its_slot_back(theatre):
    async def whole() -> None:
        await serve(theatre, 0)
        tasks = [asyncio.ensure_future(theatre.engine.generate(request(prompt_of(5), 240))) for _ in range(SLOTS + 2)]
        await theatre.under_way(3)
        assert (theatre.engine.stats().running, theatre.engine.stats().waiting) == (SLOTS, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (theatre.engine.stats().running, theatre.engine.stats().waiting) == (0, 0)
        assert len((await theatre.engine.generate(request(prompt_of(5), 8))).token_ids) == 8

    theatre.run(whole())


@pytest.mark.parametrize(("bad", "words"), [
    (request([], 4), "a prompt and room"),
    (request(prompt_of(200), 100), "max_tokens=256"),
    (request([64], 4), "outside the vocabulary"),
    (request([3], 4, stop=("",)), "empty stop string"),
    (request([3], 4, sampling=Sampling(temperature=0.001)), "down to 0.01"),
    (request([3], 4, sampling=Sampling(top_p=0.0)), "top_p"),
])  # fmt: skip
def test_an_impossible_request_is_refused_by_name(theatre, bad, words):
    with pytest.raises(EngineError, match=words):
        theatre.run(theatre.engine.generate(bad))


def test_sleeping_is_refused_on_a_cpu_with_the_reason(theatre):
    for verb in (theatre.engine.sleep, theatre.engine.wake):
        with pytest.raises(EngineError, match="no device memory to give back"):
            theatre.run(verb())


def test_a_killed_core_fails_its_sequences_and_its_successor_serves_the_former_version_first(theatre):
    engine, job = theatre.engine, request(prompt_of(5), 24, seed=6)

    async def whole() -> None:
        ref, revivals = await serve(theatre, 2), engine.stats().extra["revivals"]
        before = await engine.generate(job)
        lost = [asyncio.ensure_future(engine.generate(request(prompt_of(5), 240, seed=i))) for i in range(3)]
        await theatre.under_way(10)
        old_family = family(engine._core._home.mark)
        for pid in old_family:
            os.kill(pid, signal.SIGKILL)
        for outcome in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "core died" in str(outcome)
        after = await engine.generate(job)
        assert (after.token_ids, after.logprobs, after.spans[0].ref) == (before.token_ids, before.logprobs, ref)
        assert engine.stats().extra["revivals"] == revivals + 1 and engine.stats().extra["dead"] == 0
        assert not set(family(engine._core._home.mark)) & set(old_family)

    theatre.run(whole())


def test_a_core_that_dies_while_it_scores_has_a_successor_that_is_asked_again(theatre, tmp_path):
    engine, ids = theatre.engine, prompt_of(40)
    learner = Learner(save(tmp_path, 3))

    async def whole() -> None:
        ref = await serve(theatre, 3)
        revivals = engine.stats().extra["revivals"]
        for pid in family(engine._core._home.mark):
            os.kill(pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
        scored = asyncio.ensure_future(engine.score(ids, start=1, temperature=1.0))
        await until(lambda: engine.stats().running == 1)
        for pid in family(engine._core._home.mark):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.stats().blocked)  # starting a core may take longer than an engine may be silent
        assert_equal(await scored, learner.logprobs(ids[:1], ids[1:]))
        assert engine.stats().extra["revivals"] == revivals + 1 and engine.installed == ref
        assert not engine.stats().blocked

    theatre.run(whole())


def test_a_core_that_dies_while_an_install_waits_for_it_is_replaced_and_the_old_version_serves(theatre):
    engine = theatre.engine

    async def whole() -> None:
        old = await serve(theatre, 1)
        for pid in family(engine._core._home.mark):
            os.kill(pid, signal.SIGSTOP)
        install = asyncio.ensure_future(serve(theatre, 2))
        await until(lambda: not engine._open.is_set())
        for pid in family(engine._core._home.mark):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WeightsError, match=f"{old} serves on"):
            await install
        done = await engine.generate(request(prompt_of(5), 24))
        assert done.spans[0].ref == old == engine.installed
        assert_equal(done.logprobs, truth_logprobs(model(1), prompt_of(5), done.token_ids))

    theatre.run(whole())


def test_closing_ends_those_who_wait_and_leaves_no_process_and_no_folder(theatre):
    engine = theatre.engine
    mark, folder = engine._core._home.mark, engine._core._home.folder

    async def whole() -> None:
        running = asyncio.ensure_future(engine.generate(request(prompt_of(5), 240)))
        await theatre.under_way(3)
        assert family(mark) and os.path.isdir(folder)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(prompt_of(5), 4))
        with pytest.raises(EngineError, match="closed"):
            await engine.install(document(model(1)), version())
        assert family(mark) == [] and not os.path.exists(folder)

    theatre.run(whole())
