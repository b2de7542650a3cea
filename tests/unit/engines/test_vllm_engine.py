"""The real vLLM on this CPU: what it says of its tokens is what the learner says, whatever is installed meanwhile."""

import asyncio
import os
import signal
from itertools import count

import numpy as np
import pytest
import torch

from actors.engines.base import Generation
from actors.engines.native.engine import NativeEngine
from actors.engines.vllm import core as vllm_core
from actors.engines.vllm import engine as vllm_engine
from actors.engines.vllm.process import StagedDocument
from actors.engines.vllm.reaper import group_pids
from streamrl.errors import EngineError, RequestError, WeightsError
from streamrl.messages import Group, Member, Sampling, VersionRef
from streamrl.messages.validate import unpack_sets
from tests.unit.engines.tiny_models import (
    GREEDY,
    VOCAB,
    character_tokenizer,
    document,
    prompt_of,
    request,
    truth_logprobs,
    two_model_logprobs,
    until,
)
from tests.unit.engines.vllm_harness import MAX_TOKENS, NEEDS_VLLM, SLOTS, EngineHarness, Learner, model, save
from tests.unit.learner.at_lag_zero import assert_ratios_are_1, generated

pytestmark = NEEDS_VLLM
MOST, MEAN = 1e-3, 1e-4
VERSIONS = count(1)


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> EngineHarness:
    harness = EngineHarness(save(tmp_path_factory.mktemp("model"), 0))
    yield harness
    harness.close()


def version() -> VersionRef:
    return VersionRef(1, next(VERSIONS))


async def serve(harness: EngineHarness, seed: int) -> VersionRef:
    """Install the model of this seed as the next version."""
    ref = version()
    await harness.engine.install(document(model(seed)), ref)
    return ref


def num_sampled(member: Member) -> int:
    """Tokens of a member that the engine sampled."""
    return sum(end - start for start, end in member.mask)


def assert_equal(logprobs, truth: torch.Tensor) -> None:
    difference = (torch.tensor(list(logprobs)) - truth).abs()
    assert difference.max() <= MOST and difference.mean() <= MEAN


def test_logprobs_are_the_learners_before_and_after_each_of_five_updates_in_flight(harness, tmp_path):
    learners = [Learner(save(tmp_path / str(seed), seed)) for seed in range(6)]

    async def compare(seed: int) -> None:
        for temperature in (1.0, 0.6):
            sampling = Sampling(temperature=temperature)
            jobs = [request(prompt_of(3 + i, i), 24, seed=i, sampling=sampling) for i in range(6)]
            for job, done in zip(jobs, await asyncio.gather(*map(harness.engine.generate, jobs)), strict=True):
                assert_equal(done.logprobs, learners[seed].logprobs(job.prompt_ids, done.token_ids, temperature))

    async def whole() -> None:
        await serve(harness, 0)
        await compare(0)
        for seed in range(1, 6):
            old = harness.engine.installed
            weights = document(model(seed))  # before: on a busy machine the sequences would end meanwhile
            jobs = [request(prompt_of(5, 10 + i), 240, seed=i) for i in range(3)]
            tasks = [asyncio.ensure_future(harness.engine.generate(job)) for job in jobs]
            await harness.under_way(20)
            await harness.engine.install(weights, new := version())
            for job, done in zip(jobs, await asyncio.gather(*tasks), strict=True):
                assert [span.ref for span in done.spans] == [old, new]
                switch = done.spans[0].end
                assert 20 <= switch < 240 and done.spans[1].end == len(done.token_ids) == 240
                told = learners[seed - 1].logprobs(job.prompt_ids, done.token_ids[:switch])
                assert_equal(done.logprobs[:switch], told)
                # Later tokens see the cache that the old weights left behind: that is what they were drawn from.
                both = two_model_logprobs(model(seed - 1), model(seed), job.prompt_ids, done.token_ids, switch)
                assert_equal(done.logprobs, both)
            await compare(seed)

    harness.run(whole())


@pytest.mark.parametrize(
    "words", ["top_p=0.9", "top_k=4", "min_p=0.1", "top_p=0.9 max_kept=5", "temperature=0.7 top_k=9"]
)
def test_the_ratio_at_lag_0_is_1_where_ids_are_cut_off(harness, tmp_path, words):
    async def rollout() -> list[Group]:
        await serve(harness, 2)
        return await generated(harness.engine, character_tokenizer(), *words.split())

    groups = harness.run(rollout())
    assert_ratios_are_1(groups, save(tmp_path, 2), VOCAB)
    members = [member for one in groups for member in one.members]
    sizes = np.concatenate([unpack_sets(member.sets, num_sampled(member))[0] for member in members])
    most = {"top_k=4": 4, "top_p=0.9 max_kept=5": 5, "temperature=0.7 top_k=9": 9}.get(words, VOCAB - 1)
    assert 1 <= sizes.min() <= sizes.max() <= most


def test_requests_with_and_without_sets_share_a_batch(harness):
    samplings = [Sampling(), Sampling(top_k=4), GREEDY, Sampling(top_p=0.9, top_k=1024)]
    jobs = [request(prompt_of(5, i), 16, seed=i, sampling=one) for i, one in enumerate(samplings)]

    async def together() -> list[Generation]:
        await serve(harness, 2)
        return await asyncio.gather(*map(harness.engine.generate, jobs))

    plain, ranked, greedy, nucleus = harness.run(together())
    assert plain.sets is None and greedy.sets is None and set(greedy.logprobs) == {0.0}
    assert [len(one) for one in ranked.sets] == [4] * len(ranked.token_ids)
    for done in (ranked, nucleus):
        assert all(token in ids for token, ids in zip(done.token_ids, done.sets, strict=True))


def test_greedy_tokens_are_the_native_engines(harness):
    jobs = [request(prompt_of(4 + 3 * i, i), 32, sampling=GREEDY) for i in range(8)]

    async def whole() -> None:
        ref = await serve(harness, 3)
        native = NativeEngine(model(0), None, max_num_seqs=SLOTS, max_tokens=MAX_TOKENS, num_threads=1)
        try:
            await native.install(document(model(3)), ref)
            for ours, theirs in zip(
                await asyncio.gather(*map(native.generate, jobs)),
                await asyncio.gather(*map(harness.engine.generate, jobs)), strict=True,
            ):
                assert ours == theirs
        finally:
            await native.close()

    harness.run(whole())


def test_the_same_weights_again_change_no_number(harness):
    job = request(prompt_of(6), 200, seed=3)

    async def whole() -> None:
        first = await serve(harness, 4)
        before = await harness.engine.generate(job)
        running = asyncio.ensure_future(harness.engine.generate(job))
        await harness.under_way(10)
        second = await serve(harness, 4)
        across, after = await running, await harness.engine.generate(job)
        for other in (across, after):
            assert (other.token_ids, other.logprobs) == (before.token_ids, before.logprobs)
        assert [span.ref for span in across.spans] == [first, second] and after.spans[0].ref == second

    harness.run(whole())


def test_given_tokens_are_scored_like_the_learner_scores_them(harness, tmp_path):
    learner = Learner(save(tmp_path, 5))
    ids = prompt_of(MAX_TOKENS)

    async def whole() -> None:
        await serve(harness, 5)
        assert_equal(await harness.engine.score(ids, start=1, temperature=1.0), learner.logprobs(ids[:1], ids[1:]))
        with pytest.raises(EngineError, match="temperature=0.5"):
            await harness.engine.score(ids, start=1, temperature=0.5)

    harness.run(whole())


def test_given_tokens_are_scored_at_once_though_every_slot_is_taken_and_more_sequences_wait(harness):
    engine = harness.engine

    async def whole() -> None:
        await serve(harness, 5)
        jobs = [request(prompt_of(5), 240, seed=seed) for seed in range(SLOTS + 2)]
        tasks = [asyncio.ensure_future(engine.generate(job)) for job in jobs]
        await harness.under_way(3)
        assert len(await engine.score(prompt_of(20), start=1, temperature=1.0)) == 19
        assert (engine.stats().running, engine.stats().waiting) == (SLOTS, 2), "none of them has ended"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    harness.run(whole())


def test_with_recompute_later_logprobs_are_those_of_the_new_weights_alone(harness):
    job = request(prompt_of(9), 200, seed=1)

    async def whole() -> None:
        await serve(harness, 1)
        running = asyncio.ensure_future(harness.engine.generate(job))
        await harness.under_way(10)
        new = await serve(harness, 2)
        done = await running
        assert done.spans[1].ref == new
        switch = done.spans[0].end
        truths = [truth_logprobs(model(seed), job.prompt_ids, done.token_ids) for seed in (1, 2)]
        assert_equal(done.logprobs, torch.cat([truths[0][:switch], truths[1][switch:]]))

    with harness.policy("recompute"):
        harness.run(whole())


def test_with_finish_no_sequence_sees_two_versions_and_none_begins_before_the_install(harness):
    async def whole() -> None:
        old = await serve(harness, 1)
        jobs = [request(prompt_of(5, i), 150, seed=i) for i in range(3)]
        running = [asyncio.ensure_future(harness.engine.generate(job)) for job in jobs]
        await harness.under_way(5)
        assert not harness.engine.stats().blocked
        install = asyncio.ensure_future(serve(harness, 2))
        await until(lambda: not harness.engine._open.is_set())  # staged, and the door is closed
        await until(lambda: harness.engine.stats().blocked or install.done())
        assert not install.done(), "it said all the while that it was waiting for sequences"
        late = asyncio.ensure_future(harness.engine.generate(request(prompt_of(5), 8)))
        new = await install
        assert all(task.done() for task in running)
        assert [span.ref for task in running for span in (await task).spans] == [old] * 3
        assert [span.ref for span in (await late).spans] == [new]
        assert not harness.engine.stats().blocked

    with harness.policy("drain"):
        harness.run(whole())


def test_a_prompt_read_under_old_weights_is_not_reused_under_new_ones(harness):
    prompt = prompt_of(200)

    async def whole() -> None:
        for seed in (1, 2):
            await serve(harness, seed)
            for _ in range(2):  # the second one may reuse what the first one left in the cache
                done = await harness.engine.generate(request(prompt, 16, seed=4))
                assert_equal(done.logprobs, truth_logprobs(model(seed), prompt, done.token_ids))

    harness.run(whole())


@pytest.mark.parametrize("policy", ["continue", "drain"])
def test_a_sequence_that_an_install_overtakes_reads_no_prompt_from_the_older_cache(harness, policy, monkeypatch):
    engine, prompt, sequences = harness.engine, prompt_of(200), []
    stage, pause = engine._stage, engine._core.pause

    def send(number: int) -> None:
        for pid in group_pids(engine._core.group.mark):
            os.kill(pid, number)

    async def submitted_last(staged) -> None:
        await stage(staged)
        send(signal.SIGSTOP)  # the core finds the sequence and the pause together
        sequences.append(asyncio.ensure_future(engine.generate(request(prompt, 16, seed=5))))
        await until(lambda: engine.stats().running == 1)

    async def pause_sent(mode: str, clear_cache: bool) -> None:
        paused = asyncio.ensure_future(pause(mode, clear_cache))
        for _ in range(50):
            await asyncio.sleep(0)
        send(signal.SIGCONT)
        await paused

    async def whole() -> None:
        overtaken = False
        while not overtaken:  # the core may read the one before it sees the other
            await serve(harness, 1)
            await engine.generate(request(prompt, 4))
            read = engine.stats().prefill_tokens_total
            with monkeypatch.context() as patched:
                patched.setattr(engine, "_stage", submitted_last)
                patched.setattr(engine._core, "pause", pause_sent)
                new = await serve(harness, 2)
            done = await sequences[-1]
            if done.spans[0].ref == new:
                assert_equal(done.logprobs, truth_logprobs(model(2), prompt, done.token_ids))
                overtaken = engine.stats().prefill_tokens_total == read + 2 * len(prompt)

    with harness.policy(policy):
        harness.run(whole())


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
def test_a_document_that_does_not_fit_is_refused_by_name_and_the_old_version_serves(harness, kind):
    async def whole() -> None:
        old = await serve(harness, 1)
        with pytest.raises(WeightsError, match="model.extra|layers.0"):
            await harness.engine.install(spoiled(kind), version())
        done = await harness.engine.generate(request(prompt_of(5), 24))
        assert done.spans[0].ref == old == harness.engine.installed
        assert_equal(done.logprobs, truth_logprobs(model(1), prompt_of(5), done.token_ids))

    harness.run(whole())


def test_a_load_that_fails_halfway_is_undone_and_running_sequences_never_notice(harness, monkeypatch):
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
        old = await serve(harness, 1)
        running = asyncio.ensure_future(harness.engine.generate(job))
        await harness.under_way(10)
        monkeypatch.setattr(vllm_engine, "StagedDocument", Torn)
        with pytest.raises(WeightsError, match=f"failed to load version 1:.*, {old} keeps serving"):
            await serve(harness, 2)
        for done in (await running, await harness.engine.generate(job)):
            assert {span.ref for span in done.spans} == {old}
            assert_equal(done.logprobs, truth_logprobs(model(1), job.prompt_ids, done.token_ids))
        assert harness.engine.stats().extra["restarts"] == 0

    harness.run(whole())


def test_a_load_that_cannot_be_undone_costs_the_running_sequences_and_a_core_but_not_the_old_version(
    harness, monkeypatch
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
        old = await serve(harness, 1)
        restarts = harness.engine.stats().extra["restarts"]
        running = asyncio.ensure_future(harness.engine.generate(job))
        await harness.under_way(10)
        for module in (vllm_engine, vllm_core):
            monkeypatch.setattr(module, "StagedDocument", Torn)
        with pytest.raises(WeightsError, match=f"{old} keeps serving"):
            await serve(harness, 2)
        with pytest.raises(EngineError, match="core died"):
            await running  # vLLM would never have answered
        done = await harness.engine.generate(job)
        assert {span.ref for span in done.spans} == {old}
        assert_equal(done.logprobs, truth_logprobs(model(1), job.prompt_ids, done.token_ids))
        assert harness.engine.stats().extra["restarts"] == restarts + 1

    harness.run(whole())


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd_and_another_turn_others(harness):
    job, longer = request(prompt_of(7), 40, seed=9), request([*prompt_of(7), 5], 40, seed=9)
    crowd = [request(prompt_of(3 + i, i), 30 + i, seed=i) for i in range(SLOTS)]

    async def whole() -> None:
        await serve(harness, 0)
        alone = await harness.engine.generate(job)
        among, turn, *_ = await asyncio.gather(*map(harness.engine.generate, [job, longer, *crowd]))
        assert among.token_ids == alone.token_ids != turn.token_ids

    harness.run(whole())


def test_end_tokens_and_stop_strings_end_a_sequence_and_are_kept(harness):
    jobs = [request(prompt_of(5, i), 100, seed=i, ignore_eos=False) for i in range(SLOTS)]
    text = character_tokenizer().decode

    async def whole() -> None:
        await serve(harness, 0)
        ended = await asyncio.gather(*map(harness.engine.generate, jobs))
        assert {done.finish for done in ended} >= {"stop"}
        for done in ended:
            assert (done.token_ids.index(1) if 1 in done.token_ids else 99) == len(done.token_ids) - 1
            assert done.finish == ("stop" if done.token_ids[-1] == 1 else "length")
        free = await harness.engine.generate(request(prompt_of(5), 60, seed=7))
        stop = text(free.token_ids)[20:22]
        stopped = await harness.engine.generate(request(prompt_of(5), 60, seed=7, stop=(stop,)))
        assert stopped.finish == "stop" and free.finish == "length"
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        assert text(stopped.token_ids).endswith(stop) and stop not in text(stopped.token_ids[:-1])
        assert stopped.logprobs == free.logprobs[: len(stopped.token_ids)]
        seed, first = next((seed, done) for seed, done in enumerate(ended) if done.finish == "stop")
        past = await harness.engine.generate(request(prompt_of(5, seed), 100, seed=seed))
        tag = text(past.token_ids[len(first.token_ids) + 4 :][:4])
        tagged = await harness.engine.generate(request(prompt_of(5, seed), 100, seed=seed, stop=(tag,)))
        assert tagged.finish == "stop" and len(tagged.token_ids) == len(first.token_ids) + 8, "the end is ignored"

    harness.run(whole())


def test_a_cancelled_sequence_gives_its_place_back(harness):
    async def whole() -> None:
        await serve(harness, 0)
        tasks = [asyncio.ensure_future(harness.engine.generate(request(prompt_of(5), 240))) for _ in range(SLOTS + 2)]
        await harness.under_way(3)
        assert (harness.engine.stats().running, harness.engine.stats().waiting) == (SLOTS, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (harness.engine.stats().running, harness.engine.stats().waiting) == (0, 0)
        assert len((await harness.engine.generate(request(prompt_of(5), 8))).token_ids) == 8

    harness.run(whole())


@pytest.mark.parametrize(("bad", "words"), [
    (request([], 4), "a prompt and room"),
    (request(prompt_of(200), 100), "max_tokens=256"),
    (request([64], 4), "outside the vocabulary"),
    (request([3], 4, stop=("",)), "empty stop string"),
    (request([3], 4, sampling=Sampling(temperature=0.001)), "down to 0.01"),
    (request([3], 4, sampling=Sampling(temperature=2.5)), "up to 2.0"),
    (request([3], 4, sampling=Sampling(top_p=0.0)), "top_p"),
    (request([3], 4, stop=("a", "b\ud83d")), "half a surrogate pair"),
])  # fmt: skip
def test_an_impossible_request_is_refused_by_name(harness, bad, words):
    with pytest.raises(RequestError, match=words):
        harness.run(harness.engine.generate(bad))


def test_a_killed_core_fails_its_sequences_and_its_successor_serves_the_former_version_first(harness):
    engine, job = harness.engine, request(prompt_of(5), 24, seed=6)

    async def whole() -> None:
        ref, restarts = await serve(harness, 2), engine.stats().extra["restarts"]
        before = await engine.generate(job)
        lost = [asyncio.ensure_future(engine.generate(request(prompt_of(5), 240, seed=i))) for i in range(3)]
        await harness.under_way(10)
        old_group = group_pids(engine._core.group.mark)
        for pid in old_group:
            os.kill(pid, signal.SIGKILL)
        for outcome in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(outcome, EngineError) and "core died" in str(outcome)
        after = await engine.generate(job)
        assert (after.token_ids, after.logprobs, after.spans[0].ref) == (before.token_ids, before.logprobs, ref)
        assert engine.stats().extra["restarts"] == restarts + 1 and engine.stats().extra["dead"] == 0
        assert not set(group_pids(engine._core.group.mark)) & set(old_group)

    harness.run(whole())


def test_a_core_that_dies_while_it_scores_has_a_successor_that_is_asked_again(harness, tmp_path):
    engine, ids = harness.engine, prompt_of(40)
    learner = Learner(save(tmp_path, 3))

    async def whole() -> None:
        ref = await serve(harness, 3)
        restarts = engine.stats().extra["restarts"]
        for pid in group_pids(engine._core.group.mark):
            os.kill(pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
        scored = asyncio.ensure_future(engine.score(ids, start=1, temperature=1.0))
        await until(lambda: engine.stats().running == 1)
        for pid in group_pids(engine._core.group.mark):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.stats().blocked)  # starting a core may take longer than an engine may be silent
        assert_equal(await scored, learner.logprobs(ids[:1], ids[1:]))
        assert engine.stats().extra["restarts"] == restarts + 1 and engine.installed == ref
        assert not engine.stats().blocked

    harness.run(whole())


def test_a_core_that_dies_while_an_install_waits_for_it_is_replaced_and_the_old_version_serves(harness):
    engine = harness.engine

    async def whole() -> None:
        old = await serve(harness, 1)
        for pid in group_pids(engine._core.group.mark):
            os.kill(pid, signal.SIGSTOP)
        install = asyncio.ensure_future(serve(harness, 2))
        await until(engine._exchange.locked)
        for pid in group_pids(engine._core.group.mark):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WeightsError, match=f"{old} keeps serving"):
            await install
        done = await engine.generate(request(prompt_of(5), 24))
        assert done.spans[0].ref == old == engine.installed
        assert_equal(done.logprobs, truth_logprobs(model(1), prompt_of(5), done.token_ids))

    harness.run(whole())


def test_closing_ends_those_who_wait_and_leaves_no_process_and_no_folder(harness):
    engine = harness.engine
    mark, folder = engine._core.group.mark, engine._core.group.folder

    async def whole() -> None:
        running = asyncio.ensure_future(engine.generate(request(prompt_of(5), 240)))
        await harness.under_way(3)
        assert group_pids(mark) and os.path.isdir(folder)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(prompt_of(5), 4))
        with pytest.raises(EngineError, match="closed"):
            await engine.install(document(model(1)), version())
        assert group_pids(mark) == [] and not os.path.exists(folder)

    harness.run(whole())
