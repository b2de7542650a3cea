"""The native engine gives what plain forward passes give, whatever else it is doing."""

import asyncio
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.base import VersionSpan
from actors.engines.native import forward as native_attention
from actors.engines.native.engine import NativeEngine, build_model
from actors.engines.native.forward import ATTENTION_NAME, Forward, Prompt
from learner.model.scoring.logprobs import PLAIN, _logits
from streamrl.errors import EngineError, RequestError
from streamrl.messages import Sampling
from streamrl.messages.seeding import uniforms
from tests.unit.engines.tiny_models import (
    GREEDY,
    V1,
    VOCAB,
    GatedTokenizer,
    assert_logprobs,
    character_tokenizer,
    document,
    engine_for,
    llama,
    mistral,
    prompt_of,
    qwen3,
    request,
    run,
    truth_greedy,
    truth_logits,
    until,
)

pytestmark = pytest.mark.timeout(60)
MODELS = pytest.mark.parametrize("make", [qwen3, llama, mistral], ids=["qwen3", "llama", "sliding_window"])


@MODELS
async def test_greedy_tokens_equal_generate_for_prompts_admitted_at_different_times(make):
    model = make()
    jobs = [(prompt_of(3 + 7 * n % 19, seed=n), 5 + 9 * n % 31) for n in range(9)]

    async with engine_for(model, max_num_seqs=3, prefill_tokens=24) as engine:
        first = [asyncio.create_task(engine.generate(request(p, n, sampling=GREEDY))) for p, n in jobs[:5]]
        await first[0]
        late = [engine.generate(request(p, n, sampling=GREEDY)) for p, n in jobs[5:]]
        done = await asyncio.gather(*first, *late)

    for (prompt, new), generation in zip(jobs, done, strict=True):
        assert generation.token_ids == truth_greedy(model, prompt, new)
        assert generation.logprobs == [0.0] * new
        assert generation.finish == "length"
        assert generation.spans == [VersionSpan(V1, 0, new)]


def test_a_half_precision_model_gives_float32_logits_as_the_learner_does():
    """Logits of this size, rounded to bfloat16, are up to 0.06 off, which the weight probe would take for damage."""
    model = qwen3(tied=False).bfloat16()
    model.lm_head.weight.data.mul_(20)
    head, hidden = model.lm_head, torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        learners = _logits(hidden, head.weight, None, PLAIN, torch.ones(5))
        assert float((head(hidden).float() - learners).abs().max()) > 0.03 and float(learners.abs().max()) > 16
        model.set_attn_implementation(ATTENTION_NAME)
        forward = Forward(model, 2, 64)
        torch.testing.assert_close(head(hidden), learners, atol=1e-4, rtol=0)
        logits = forward.run(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 0, [Prompt([3, 4])])
    assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())


@MODELS
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_a_direct_forward_pass(make, temperature):
    model = make()
    jobs = [(prompt_of(2 + 3 * n, seed=n), 40 - 5 * n) for n in range(6)]

    async with engine_for(model, max_num_seqs=4) as engine:
        sampling = Sampling(temperature=temperature)
        done = await asyncio.gather(
            *(engine.generate(request(p, n, seed=i, sampling=sampling)) for i, (p, n) in enumerate(jobs))
        )
        scores = await engine.score(jobs[0][0] + done[0].token_ids, start=2, temperature=temperature)

    for (prompt, _), generation in zip(jobs, done, strict=True):
        assert_logprobs(model, prompt, generation, temperature)
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(done[0].logprobs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_k=5), Sampling(0.7, top_p=0.8), Sampling(1.3, min_p=0.1), Sampling(0.9, 0.9, 12, 0.02)],
    ids=["top_k", "top_p", "min_p", "all"],
)
async def test_logprobs_are_those_of_the_truncated_and_renormalized_distribution(sampling):
    model, prompt = qwen3(), prompt_of(6)

    async with engine_for(model) as engine:
        # Siblings with other distributions, so that rows are really treated one by one.
        others = [engine.generate(request(prompt, 30, sampling=s)) for s in (Sampling(), GREEDY, Sampling(0.5))]
        generation, *_ = await asyncio.gather(engine.generate(request(prompt, 40, sampling=sampling)), *others)

    logits = truth_logits(model, prompt + generation.token_ids)[len(prompt) - 1 : -1]
    for row, token, logprob in zip(logits, generation.token_ids, generation.logprobs, strict=True):
        assert logprob == pytest.approx(slow_processed(row, sampling)[token], abs=2e-5)


def slow_processed(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """token -> log-prob, by the words of the definition."""
    scores = (logits.double() / sampling.temperature).tolist()
    kept = sorted(range(len(scores)), key=lambda token: -scores[token])
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    probs = normalized({token: scores[token] for token in kept})
    nucleus, mass = [], 0.0
    for token in kept:
        if mass < sampling.top_p:
            nucleus.append(token)
        mass += probs[token]
    largest = max(probs[token] for token in nucleus)
    final = normalized({token: scores[token] for token in nucleus if probs[token] >= sampling.min_p * largest})
    return {token: float(torch.tensor(p, dtype=torch.float64).log()) for token, p in final.items()}


def normalized(scores: dict[int, float]) -> dict[int, float]:
    weights = torch.softmax(torch.tensor(list(scores.values()), dtype=torch.float64), 0).tolist()
    return dict(zip(scores, weights, strict=True))


async def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd():
    model = qwen3()
    wanted = request(prompt_of(5), 60, seed=77, sampling=Sampling(0.9, top_p=0.95))

    async with engine_for(model, max_num_seqs=6) as engine:
        alone = await engine.generate(wanted)
        crowd = [request(prompt_of(1 + n, seed=n), 10 + 3 * n, seed=n) for n in range(17)]
        # In the last slot, so that it changes its row whenever another sequence ends; then in the middle of many.
        *_, moved = await asyncio.gather(*(engine.generate(r) for r in (*crowd[:5], wanted)))
        again, *_ = await asyncio.gather(*(engine.generate(r) for r in (wanted, *crowd)))
        other = await engine.generate(request(prompt_of(5), 60, seed=78, sampling=wanted.sampling))

    assert moved.token_ids == alone.token_ids
    assert again.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids


def test_a_later_turn_with_the_same_seed_draws_other_numbers_and_a_resumed_one_the_same():
    model, prompt = qwen3(), prompt_of(5)

    async def work():
        async with engine_for(model) as engine:
            whole = await engine.generate(request(prompt, 20, seed=3))
            resumed = await engine.generate(request(prompt + whole.token_ids[:8], 12, seed=3))
        assert resumed.token_ids == whole.token_ids[8:]

    run(work)
    seeds = torch.zeros(2, dtype=torch.int64).numpy().astype("uint64")
    first, second = uniforms(seeds, torch.tensor([5, 6]).numpy().astype("uint64"))
    assert first != second


async def test_members_of_a_group_read_their_prompt_once():
    model, prompt = qwen3(), prompt_of(20)

    async with engine_for(model, max_num_seqs=4, install=False) as engine:
        # Six members and four places: two come when siblings have left, and copy from one that still runs.
        tasks = [
            asyncio.create_task(engine.generate(request(prompt, 10 if n < 3 else 60, seed=n))) for n in range(6)
        ]
        await until(lambda: engine.stats().waiting == 6)
        await engine.install(document(model), V1)
        done = await asyncio.gather(*tasks)
        assert engine.stats().prefill_tokens_total == len(prompt)
    for generation in done:
        assert_logprobs(model, prompt, generation)


@MODELS
async def test_prompts_of_one_length_attend_in_one_call_and_give_what_each_gives_alone(make, monkeypatch):
    model, calls, attend = make(), [], native_attention.attend
    # Of 15 tokens: a group of two, one alone, a group of two; of 19 in the middle: one alone.
    prompts = [prompt_of(15, seed=n) for n in (0, 0, 1)] + [prompt_of(19)] + [prompt_of(15, seed=n) for n in (2, 2)]

    def counted(query, *rest, **options):
        calls.append(query.shape)
        return attend(query, *rest, **options)

    async with engine_for(model, max_num_seqs=8, install=False) as engine:
        tasks = [asyncio.create_task(engine.generate(request(p, 12, seed=n))) for n, p in enumerate(prompts)]
        await until(lambda: engine.stats().waiting == len(prompts))
        monkeypatch.setattr(native_attention, "attend", counted)
        await engine.install(document(model), V1)
        done = await asyncio.gather(*tasks)
    num_layers = model.config.num_hidden_layers
    assert [(shape[0], shape[2]) for shape in calls[: 2 * num_layers]] == [(3, 15), (1, 19)] * num_layers
    for prompt, generation in zip(prompts, done, strict=True):
        assert_logprobs(model, prompt, generation)


@MODELS
async def test_late_members_of_two_groups_join_in_one_pass_beside_a_prompt_that_is_new(make, monkeypatch):
    model, copies, copy_rows = make(), [], native_attention.SlotCache.copy_rows
    one, other, new = prompt_of(9, seed=1), prompt_of(21, seed=2), prompt_of(13, seed=3)
    brief = [(prompt_of(5, seed=n), 8) for n in (4, 5, 6)]  # they end in one step, and three join in the next
    jobs = [(one, 40), (other, 40), *brief, (other, 20), (new, 20), (one, 20)]

    def counted(cache, sources, targets, num_tokens):
        copies.append((list(sources), list(targets), num_tokens))
        copy_rows(cache, sources, targets, num_tokens)

    async with engine_for(model, max_num_seqs=5, install=False) as engine:
        monkeypatch.setattr(native_attention.SlotCache, "copy_rows", counted)
        tasks = [asyncio.create_task(engine.generate(request(p, n, seed=i))) for i, (p, n) in enumerate(jobs)]
        await until(lambda: engine.stats().waiting == len(jobs))
        await engine.install(document(model), V1)
        done = await asyncio.gather(*tasks)
        assert engine.stats().prefill_tokens_total == sum(map(len, (one, other, new, *(p for p, _ in brief))))
    assert max(len(sources) for sources, _, num_tokens in copies if num_tokens == len(other)) == 2, copies
    for (prompt, _), generation in zip(jobs, done, strict=True):
        assert_logprobs(model, prompt, generation)


async def test_an_end_token_ends_a_sequence_and_is_kept():
    model = qwen3()

    async with engine_for(model) as engine:
        done = await asyncio.gather(
            *(engine.generate(request(prompt_of(4), 200, seed=n, ignore_eos=False)) for n in range(12))
        )
        ignoring = await engine.generate(request(prompt_of(4), 200, seed=0))
    stopped = [generation for generation in done if generation.finish == "stop"]
    assert stopped, "no sequence met the end token: the test needs other seeds"
    for generation in stopped:
        assert generation.token_ids.index(1) == len(generation.token_ids) - 1
    assert len(ignoring.token_ids) == 200


async def test_a_stop_text_ends_a_sequence_after_an_end_token_that_is_ignored():
    tokenizer, jobs = character_tokenizer(), [(prompt_of(4), 200, seed) for seed in range(12)]

    async with engine_for(qwen3(), tokenizer) as engine:
        ended = await asyncio.gather(*(engine.generate(request(p, n, seed=s, ignore_eos=False)) for p, n, s in jobs))
        (prompt, new, seed), first = next(pair for pair in zip(jobs, ended, strict=True) if pair[1].finish == "stop")
        free = await engine.generate(request(prompt, new, seed=seed))
        stop = tokenizer.decode(free.token_ids[len(first.token_ids) + 4 :][:4])
        done = await engine.generate(request(prompt, new, seed=seed, stop=(stop,)))
    assert done.finish == "stop" and len(done.token_ids) == len(first.token_ids) + 8
    assert done.token_ids == free.token_ids[: len(done.token_ids)] and 1 in done.token_ids


@settings(max_examples=25, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 18), st.integers(0, 5), st.booleans()), min_size=1, max_size=9
    )
)
def test_max_new_tokens_is_never_exceeded(jobs):
    async def work():
        requests = [request(prompt_of(p, seed=s), n, seed=s, ignore_eos=i) for p, n, s, i in jobs]
        done = await asyncio.gather(*(SHARED.generate(r) for r in requests))
        for wanted, generation in zip(requests, done, strict=True):
            assert 1 <= len(generation.token_ids) <= wanted.max_new_tokens
            assert len(generation.logprobs) == len(generation.token_ids)
            assert (generation.finish == "length") <= (len(generation.token_ids) == wanted.max_new_tokens)
            assert generation.spans == [VersionSpan(V1, 0, len(generation.token_ids))]

    run(work)


@pytest.fixture(scope="module", autouse=True)
def shared_engine():
    """One engine for the property test above, where building one for every example would take most of the time."""
    global SHARED
    model = qwen3()
    SHARED = NativeEngine(copy.deepcopy(model), None, max_num_seqs=3, max_tokens=30, num_threads=1)
    run(lambda: SHARED.install(document(model), V1))
    yield
    run(SHARED.close)


async def test_cancelling_the_waiting_task_frees_the_slot():
    model = qwen3()
    gate = GatedTokenizer(stop_at=3)

    async with engine_for(model, gate, max_num_seqs=1) as engine:
        running = asyncio.create_task(engine.generate(request(prompt_of(4), 200, stop=("never",))))
        await asyncio.to_thread(gate.reached.wait)
        queued = asyncio.create_task(engine.generate(request(prompt_of(5), 5)))
        waiting = asyncio.create_task(engine.generate(request(prompt_of(6), 5)))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        gate.go.set()

        assert len((await queued).token_ids) == 5
        for task in (running, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: engine.stats().running == engine.stats().waiting == 0)
        assert engine.stats().tokens_total < 200


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request([], 5), "needs a prompt"),
        (request([3], 0), "0 new"),
        (request([3] * 250, 7), "max_tokens=256"),
        (request([3, VOCAB], 5), "outside the vocabulary"),
        (request([3], 5, sampling=Sampling(temperature=-1.0)), "temperature=-1.0"),
        (request([3], 5, sampling=Sampling(temperature=1e-320)), "temperature=1e-320"),
        (request([3], 5, sampling=Sampling(top_p=0.0)), "top_p=0.0"),
        (request([3], 5, sampling=Sampling(top_k=2**70)), "top_k=1180591620717411303424"),
        (request([3], 5, stop=("x",)), "tokenizer"),
    ],
)
async def test_an_impossible_request_is_refused_by_name_and_the_engine_lives_on(bad, words):
    async with engine_for(qwen3()) as engine:
        with pytest.raises(RequestError, match=words):
            await engine.generate(bad)
        assert len((await engine.generate(request([3], 5))).token_ids) == 5


async def test_a_tokenizer_that_fails_fails_the_request_that_it_looks_for_alone():
    model = qwen3()

    class Broken(GatedTokenizer):
        def decode(self, ids, **_):
            super().decode(ids)
            raise RuntimeError("decoder fell over")

    gate = Broken(stop_at=1)

    async with engine_for(model, gate, max_num_seqs=2) as engine:
        running = asyncio.create_task(engine.generate(request(prompt_of(4), 9, sampling=GREEDY, stop=("never",))))
        await asyncio.to_thread(gate.reached.wait)
        waiting = asyncio.create_task(engine.generate(request(prompt_of(5), 9, sampling=GREEDY)))
        await asyncio.sleep(0)
        gate.go.set()

        with pytest.raises(RequestError, match="decoder fell over"):
            await running
        assert (await waiting).token_ids == truth_greedy(model, prompt_of(5), 9)
        assert engine.stats().extra["dead"] == 0.0


def failing(model, fails):
    """The model raises for a pass over ids of which `fails` is true."""
    def look(module, args, options):
        if fails(options["input_ids"]):
            raise RuntimeError("the model fell over")

    model.register_forward_pre_hook(look, with_kwargs=True)
    return model


async def test_a_pass_that_fails_with_a_request_fails_that_request_alone():
    model = qwen3()
    truth = {n: truth_greedy(model, prompt_of(n), 30) for n in (4, 5, 6, 7)}
    used = {0, 3, *(token for n, tokens in truth.items() for token in (*tokens, *prompt_of(n)))}
    bad = min(set(range(VOCAB)) - used)

    one = failing(model, lambda ids: bool((ids == bad).any()))
    async with engine_for(one, max_num_seqs=4, prefill_tokens=64) as engine:
        first = asyncio.create_task(engine.generate(request(prompt_of(4), 30, sampling=GREEDY)))
        await until(lambda: engine.stats().tokens_total > 2)
        killers = [engine.generate(request([3, bad, *[3] * n], 5)) for n in range(2)]
        late = [engine.generate(request(prompt_of(n), 30, sampling=GREEDY)) for n in (5, 6)]
        failed = await asyncio.gather(*killers, return_exceptions=True)
        assert all(isinstance(one, EngineError) and "the model fell over" in str(one) for one in failed)
        assert [one.token_ids for one in await asyncio.gather(first, *late)] == [truth[n] for n in (4, 5, 6)]
        assert (await engine.generate(request(prompt_of(7), 30, sampling=GREEDY))).token_ids == truth[7]
        assert engine.stats().extra["dead"] == 0.0 == engine.stats().running


async def test_a_model_that_fails_whatever_it_reads_is_a_dead_engine():
    fails = []
    model = failing(qwen3(), lambda ids: fails)

    async with engine_for(model, max_num_seqs=1) as engine:
        assert len((await engine.generate(request(prompt_of(4), 3))).token_ids) == 3
        fails.append(1)
        tasks = [asyncio.create_task(engine.generate(request(prompt_of(4), 9))) for _ in range(2)]
        for task in tasks:
            with pytest.raises(EngineError, match="engine died: RuntimeError: the model fell over"):
                await task
        with pytest.raises(EngineError, match="engine died"):
            await engine.generate(request(prompt_of(4), 9))
        assert engine.stats().extra["dead"] == 1.0


async def test_closing_ends_those_who_wait_and_may_be_done_twice():
    async with engine_for(qwen3(), install=False) as engine:
        waiting = asyncio.create_task(engine.generate(request(prompt_of(4), 9)))
        await until(lambda: engine.stats().waiting == 1)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting
        await engine.close()


async def test_a_model_built_from_its_folder_takes_weights_by_install(tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    built = build_model(tmp_path, dtype=torch.float32, device="cpu")

    async with engine_for(built, install=False) as engine:
        await engine.install(document(model), V1)
        generation = await engine.generate(request(prompt_of(4), 12, sampling=GREEDY))
    assert generation.token_ids == truth_greedy(model, prompt_of(4), 12)


def test_a_model_whose_positions_do_not_reach_max_tokens_is_refused():
    with pytest.raises(EngineError, match="max_position_embeddings=512"):
        NativeEngine(qwen3(), None, max_num_seqs=1, max_tokens=513)
