"""Decode steps as graphs: over random schedules a stand-in for CUDA graphs gives what the passes themselves give."""

import asyncio
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from actors.engines.base import Generation
from actors.engines.native import graphs as native_graphs
from actors.engines.native import matrices
from actors.engines.native.forward import ATTENTION_NAME, Forward
from actors.engines.native.graphs import Unrepeatable, bucket
from actors.engines.native.scheduler import Scheduler, Sequence
from actors.engines.native.weights import WeightSets, linear_weights
from streamrl.errors import EngineError
from streamrl.messages import Sampling, VersionRef
from tests.fakes.recorded_graph import PassesAgain, RecordedGraphs
from tests.kit.each import each
from tests.unit.engines.tiny_models import (
    GREEDY,
    TIMEOUT_S,
    V1,
    V2,
    GatedTokenizer,
    document,
    engine_for,
    prompt_of,
    qwen3,
    request,
    run,
    two_model_logprobs,
    until,
)  # fmt: skip

pytestmark = pytest.mark.timeout(60)
SLOTS, LONGEST, VOCAB, SCHEDULES = 6, 40, 48, 40  # schedules of each kind
SAMPLINGS = [Sampling(), GREEDY, Sampling(top_k=5), Sampling(temperature=0.7, top_p=0.9), Sampling(min_p=0.05)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(native_graphs, "FEWEST_ROWS", 2)
    monkeypatch.setattr(native_graphs, "FEWEST_PLACES", 8)


def tiny(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=1,
    )).eval()  # fmt: skip


KINDS = {
    "own code": {"own_code": True},  # which is what runs on a GPU
    "bfloat16": {"own_code": True, "dtype": torch.bfloat16},
    "lean": {},
    "packed": {"pack_from": 1},
    "int8": {"pack_from": 1, "int8": True},
}


class Engine:
    """The work of `NativeEngine` on its thread, one step at a time."""

    def __init__(
        self, capture: Any, *, own_code: bool = False, int8: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        model = tiny(0).to(dtype).requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)
        self.sets = WeightSets(model, linear_weights(model) if int8 else ())
        self.forward = Forward(model, SLOTS, LONGEST, capture=capture, int8=int8)
        if own_code:
            self.forward.lean = None

    def install(self, tensors: dict[str, torch.Tensor]) -> None:
        staged = self.sets.stage(tensors)
        lean = self.forward.lean
        ready = lean.ready(staged) if lean is not None else None
        self.sets.swap(staged)
        if ready is not None:
            lean.use(ready)

    @torch.inference_mode()
    def play(self, seed: int, documents: list[dict[str, torch.Tensor]]) -> list[Any]:
        """The outcomes of a random schedule, of each request in order; None where it was aborted."""
        pick = random.Random(seed)
        scheduler = Scheduler(self.forward, SLOTS, prefill_tokens=pick.choice([8, 64]))
        recompute = pick.random() < 0.5
        outcomes: list[Any] = []
        alive: dict[int, Sequence] = {}
        prompts: list[list[int]] = []
        number = 0

        def version() -> None:
            nonlocal number
            number += 1
            self.install(pick.choice(documents))
            scheduler.new_version(VersionRef(0, number), recompute=recompute)

        def deliver(place: int) -> Callable[[Any], None]:
            def keep(outcome: Any) -> None:
                outcomes[place] = outcome
                del alive[place]
            return keep

        def join() -> None:
            if not prompts or pick.random() < 0.5:
                prompts.append([pick.randrange(2, VOCAB) for _ in range(pick.randrange(1, 20))])
            prompt = pick.choice(prompts[-2:])
            sampling = pick.choice(SAMPLINGS)
            for _ in range(pick.randrange(1, 4)):
                asked = request(prompt, pick.choice([1, 4, 14]), seed=pick.getrandbits(30), sampling=sampling)
                place = len(outcomes)
                outcomes.append(None)
                alive[place] = Sequence(asked, tuple(prompt), deliver(place), frozenset({1}), None)
                scheduler.waiting.append(alive[place])

        version()
        for _ in range(10):
            if pick.random() < 0.35:
                join()
            if pick.random() < 0.15:
                version()
            if alive and pick.random() < 0.1:
                scheduler.abort(alive.pop(pick.choice(list(alive))))
            if scheduler.has_work:
                scheduler.step()
        while scheduler.has_work:
            scheduler.step()
        assert not alive
        return outcomes


def parts(outcome: Any) -> Any:
    if not isinstance(outcome, Generation):
        return type(outcome)
    return outcome.token_ids, outcome.logprobs, outcome.spans, outcome.sets and [ids.tolist() for ids in outcome.sets]


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_give_what_the_passes_give_bit_for_bit(kind, monkeypatch):
    """Compare passes of one shape: a product of more rows may sum in another order, so those without padding are near.

    Sequences join late and early, alone and as members of groups, end and are aborted, over installs in between.
    """
    more = dict(KINDS[kind])
    monkeypatch.setattr(matrices, "PACK_FROM", more.pop("pack_from", matrices.PACK_FROM))
    capture, documents = RecordedGraphs(), [document(tiny(seed)) for seed in range(3)]
    graphed, padded, plain = (Engine(one, **more) for one in (capture, PassesAgain(), None))
    shapes, compared = set(), 0
    first = list(KINDS).index(kind) * SCHEDULES
    for seed in range(first, first + SCHEDULES):
        got = graphed.play(seed, documents)
        assert list(map(parts, got)) == list(map(parts, padded.play(seed, documents))), seed
        shapes |= {shape for one in graphed.forward.graphs._sets.values() for shape in one.graphs}
        if seed % 4 or kind == "bfloat16":
            continue
        for mine, other in zip(got, plain.play(seed, documents), strict=True):
            if mine is not None:
                assert mine.token_ids == other.token_ids
                torch.testing.assert_close(mine.logprobs, other.logprobs, atol=1e-5, rtol=0)
                compared += len(mine.token_ids)
    assert graphed.forward.graphs.refused is None and plain.forward.graphs is None
    assert {rows for rows, _ in shapes} == {2, 4, 6} and {places for _, places in shapes} >= {8, 16, 24}
    assert compared > 100 or kind == "bfloat16"
    assert capture.replayed > 200


def test_two_sets_of_weights_keep_their_graphs_through_installs():
    capture, documents = RecordedGraphs(), [document(tiny(seed)) for seed in range(3)]
    engine = Engine(capture, own_code=True)
    for seed in range(20):
        engine.play(seed, documents)
    recorded = capture.recorded
    for seed in range(20):
        engine.play(seed, documents)
    assert capture.recorded == recorded <= 2 * 12


@torch.inference_mode()
def test_weights_that_are_not_finite_spoil_no_later_sequence():
    engine, plain = Engine(RecordedGraphs()), Engine(PassesAgain())
    good = document(tiny(1))
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()}
    for seed in range(4):
        spoiled = engine.play(seed, [bad])
        assert all(outcome is None or isinstance(outcome, EngineError) for outcome in spoiled)
        assert list(map(parts, engine.play(seed, [good]))) == list(map(parts, plain.play(seed, [good])))


@torch.inference_mode()
def test_a_pass_leaves_rows_alone_that_it_does_not_run():
    """A late member of a group has its prompt in the row after those that run, when they decode without it."""
    engine = Engine(RecordedGraphs())
    engine.install(document(tiny(1)))
    cache = engine.forward.cache
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(0.5)
    for n in (1, 3, 5):
        engine.forward.run(torch.full((n,), 7), torch.full((n,), 4), 5, [])
    for tensor in (*cache.keys, *cache.values):
        assert tensor.shape[0] == SLOTS + 1 and (tensor[5:SLOTS] == 0.5).all()
        assert (tensor[:5, :, 4] != 0.5).all() and (tensor[:5, :, :4] == 0.5).all() and (tensor[:5, :, 5:] == 0.5).all()


def test_the_stand_in_finds_what_a_pass_bakes_in():
    given, made = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def work() -> None:
        made.copy_(given * 2 + torch.tensor(given.tolist()) + float(given[0]))

    replay = RecordedGraphs()(work)
    replay()
    assert made.tolist() == [4.0, 7.0]
    given.copy_(torch.tensor([10.0, 20.0]))
    replay()
    assert made.tolist() == [22.0, 43.0]  # and not [40.0, 70.0]


def read_by_the_host(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x[0] > 0 else x


UNREPEATABLE = {
    "the host reads": read_by_the_host,
    "depends on values": lambda x: x[x > 1.0],
    "has a tensor on meta": lambda x: torch.empty_like(x, device="meta"),
}


@each("reason", UNREPEATABLE)
def test_what_a_graph_cannot_repeat_is_found(reason):
    with Unrepeatable(torch.device("cpu")) as found:
        UNREPEATABLE[reason](torch.tensor([1.0, 2.0]))
    assert reason in found.reason
    with Unrepeatable(torch.device("cpu")) as found:
        torch.ones(3)[torch.tensor([0, 2])] += 1
    assert found.reason is None


def mixture() -> torch.nn.Module:
    """A model whose experts are chosen by what a token is."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.3, eos_token_id=1, experts_implementation="eager",
    )).eval()  # fmt: skip


def broken(work: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("make", "capture", "reason"), [
    (mixture, RecordedGraphs(), "the host reads|depends on values"), (qwen3, broken, "RuntimeError: operation not"),
])  # fmt: skip
def test_a_model_that_cannot_be_captured_keeps_the_plain_pass(make, capture, reason, caplog):
    model = make()

    async def work() -> None:
        answers = []
        for one in (capture, None):
            async with engine_for(model, max_tokens=48, capture=one) as engine:
                answers.append([parts(await engine.generate(request(prompt_of(5), 8, seed=seed))) for seed in (1, 2)])
                if one is not None:
                    assert re.search(reason, engine._scheduler.forward.graphs.refused)
        assert answers[0] == answers[1]

    run(work)
    assert len([line for line in caplog.messages if "decodes without graphs" in line]) == 1


async def test_an_engine_decodes_by_graphs_through_an_install_and_a_later_hook():
    model, other, capture, gate = qwen3(), qwen3(5), RecordedGraphs(), GatedTokenizer(20)
    async with engine_for(model, gate, max_tokens=128, capture=capture, max_num_seqs=3) as engine:
        asked = [request(prompt_of(4 + seed), 60, seed=seed, stop=["never"] * (seed == 0)) for seed in range(5)]
        answers = [asyncio.create_task(engine.generate(one)) for one in asked]
        assert await asyncio.to_thread(gate.reached.wait, TIMEOUT_S)
        install = asyncio.create_task(engine.install(document(other), V2))
        await until(lambda: engine._swaps)
        gate.go.set()
        await install
        done = await asyncio.gather(*answers)
        assert [(span.ref, span.end) for span in done[0].spans] == [(V1, 19), (V2, 60)]
        for one, generation in zip(asked, done, strict=True):
            switch = sum(span.end - span.start for span in generation.spans if span.ref == V1)
            expected = two_model_logprobs(model, other, one.prompt_ids, generation.token_ids, switch)
            torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=1e-5)
        replayed = capture.replayed
        assert replayed > 60
        hook = engine._scheduler.forward._model.model.norm.register_forward_hook(lambda module, args, out: -out)
        turned = await engine.generate(request(prompt_of(4), 9, seed=1))
        hook.remove()
        assert capture.replayed == replayed
        assert turned.token_ids != (await engine.generate(request(prompt_of(4), 9, seed=1))).token_ids
        assert capture.replayed == replayed + 8


async def test_an_engine_that_gave_its_memory_back_captures_anew():
    model, capture = qwen3(), RecordedGraphs()
    async with engine_for(model, capture=capture, max_tokens=64) as engine:
        before = await engine.generate(request(prompt_of(4), 12))
        await engine.release()
        assert not engine._scheduler.forward.graphs._sets
        await engine.install(document(model), V2)
        recorded = capture.recorded
        after = await engine.generate(request(prompt_of(4), 12))
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
        assert capture.recorded > recorded


@torch.inference_mode()
def test_a_pass_on_a_device_needs_nothing_of_the_host():
    """The meta device stands for a GPU: what the model's own code, in half precision, makes on the host is told."""
    model = qwen3().bfloat16().to("meta").requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    forward = Forward(model, 4, 64, capture=PassesAgain())
    inputs = torch.zeros((3, 4), dtype=torch.int64, device="meta")
    with Unrepeatable(inputs.device) as found:
        logits = forward._decode(*inputs, 32)
    assert found.reason is None and logits.shape == (4, 64) and forward.lean is None


@each("count", range(1, 3000, 7))
def test_buckets_are_few_and_close(count):
    size = bucket(count, 256, 4)
    assert count <= size < (count * 1.25 if count > 1024 else count + 256) and bucket(size, 256, 4) == size
    assert len({bucket(number, 256, 4) for number in range(1, 8193)}) == 4 + 3 * 4
    assert [bucket(number, 4, 2) for number in (1, 4, 5, 9, 17, 33, 49, 64)] == [4, 4, 8, 12, 24, 48, 64, 64]


@pytest.mark.parametrize("ahead", [False, True])
async def test_tokens_and_logprobs_of_a_step_come_to_the_host_in_one_transfer(ahead, monkeypatch):
    """Counted where a number leaves a tensor: never when a pass is launched, and once when its tokens are read."""
    moved, moves = [], ("cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")
    counts = {"_draw": [], "_read": []}
    for name, found in counts.items():
        kept = getattr(Scheduler, name)

        def counting(self, given, kept=kept, found=found):
            began = len(moved)
            with torch.inference_mode():
                out = kept(self, given)
            found.append(moved[began:])
            return out

        monkeypatch.setattr(Scheduler, name, counting)
    async with engine_for(qwen3(), max_num_seqs=8) as engine:
        engine._scheduler._ahead = ahead
        for name in moves:
            kept = getattr(torch.Tensor, name)

            def counted(tensor, *args, name=name, kept=kept):
                if threading.current_thread() is engine._thread:
                    moved.append(name)
                return kept(tensor, *args)

            monkeypatch.setattr(torch.Tensor, name, counted)
        samplings = [Sampling(), GREEDY, Sampling(temperature=0.5), Sampling(min_p=0.1), Sampling(top_p=0.8)]
        await asyncio.gather(*(
            engine.generate(request(prompt_of(5), 9, seed=seed, sampling=sampling))
            for seed, sampling in enumerate(samplings)
        ))
    assert len(counts["_draw"]) == len(counts["_read"]) >= 9 + ahead
    assert not any(counts["_draw"])
    assert [reads for reads in counts["_read"] if reads != ["tolist"]] == []
