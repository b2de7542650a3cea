"""The host one pass behind the device: sequences, log-probs and labels are those of an engine that waits each time."""

import asyncio
import inspect
import random
import sys
import traceback
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from actors.engines.base import Generation
from actors.engines.native import scheduler as scheduler_module
from actors.engines.native.forward import ATTENTION_NAME, Forward
from actors.engines.native.scheduler import Sequence, StopMatcher
from streamrl.errors import EngineError
from streamrl.messages import Sampling, VersionRef
from tests.fakes.late_arrivals import LateArrivals
from tests.fakes.recorded_graph import PassesAgain, RecordedGraphs
from tests.unit.engines.test_decode_graphs import SAMPLINGS, VOCAB, Engine, parts, tiny
from tests.unit.engines.tiny_models import (
    TIMEOUT_S,
    V1,
    V2,
    GatedTokenizer,
    document,
    engine_for,
    prompt_of,
    qwen3,
    request,
    two_model_logprobs,
    until,
)

pytestmark = pytest.mark.timeout(300)
END, UNREADABLE, TURNS = 1, VOCAB - 1, 14
SCHEDULES = 70  # of each kind


def spoiled(seed: int) -> torch.nn.Module:
    """A model in which the token that ends a sequence, read by a pass of its own, gives numbers that are none."""
    model = tiny(seed)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.embed_tokens.weight.data[END] = float("nan")
    return model


@dataclass
class Asked:
    """Members of a group that come before the pass of a turn."""

    prompt: tuple[int, ...]
    members: list[tuple[int, int, Sampling, tuple[str, ...]]]  # (new tokens, seed, sampling, stop strings)


class Schedule:
    """Events before each pass, decided beforehand: what runs must not change them.

    With room for all sequences no sequence waits for the end of another, which comes a pass later where the host is
    behind. In a crowd it may, and so versions come only at the start: else other tokens would be of another version.
    """

    def __init__(self, seed: int, *, crowded: bool) -> None:
        pick = random.Random(seed)
        self.slots = 4 if crowded else 40
        self.prefill_tokens, self.recompute = pick.choice([8, 64]), pick.random() < 0.5
        self.joins: list[list[Asked]] = [[] for _ in range(TURNS)]
        self.installs = [number == 0 or (not crowded and pick.random() < 0.25) for number in range(TURNS)]
        self.documents = [pick.randrange(3) for _ in range(TURNS)]
        self.aborts: list[list[int]] = [[] for _ in range(TURNS)]
        prompts, count = [], 0
        for turn in range(TURNS):
            for _ in range(pick.choice([0, 0, 1, 2])):
                if not prompts or pick.random() < 0.6:
                    prompts.append(tuple(pick.randrange(2, VOCAB - 1) for _ in range(pick.randrange(1, 14))))
                prompt = pick.choice(prompts[-2:])
                if pick.random() < 0.05:
                    prompt = (*prompt, UNREADABLE)
                members = [
                    (pick.choice([1, 2, 5, 12, 20]), pick.getrandbits(30), pick.choice(SAMPLINGS),
                     pick.choice([(), (), ("ab", "c")]))
                    for _ in range(pick.randrange(1, 4))
                ]  # fmt: skip
                if count + len(members) <= 40:
                    self.joins[turn].append(Asked(prompt, members))
                    count += len(members)
            if count and pick.random() < 0.3:
                self.aborts[turn].append(pick.randrange(count))


def text_of(ids: Any) -> str:
    return "".join("abcdefgh"[token % 8] for token in ids)


class Played:
    """A schedule that was played: outcomes in the order of the requests, and the version of each pass."""

    @torch.inference_mode()
    def __init__(
        self, engine: Engine, schedule: Schedule, documents: list[dict[str, torch.Tensor]], *, ahead: bool,
        module: Any = scheduler_module,
    ) -> None:  # fmt: skip
        self.outcomes: list[Any] = []
        self.prompts: list[tuple[int, ...]] = []
        self.aborted: set[int] = set()
        self.served: dict[VersionRef, int] = {}
        self.arrivals = LateArrivals()
        sequences: list[Sequence] = []
        run = engine.forward.run

        def fails_on_a_prompt(ids, positions, longest, prompts, versions=()):
            if any(type(one.ids) is tuple and UNREADABLE in one.ids for one in prompts):
                raise ValueError("this prompt cannot be read")
            return run(ids, positions, longest, prompts, versions)

        def ask(asked: Asked, new: int, seed: int, sampling: Sampling, stop: tuple[str, ...]) -> None:
            one = request(asked.prompt, new, seed=seed, sampling=sampling, stop=stop)
            place = len(sequences)
            self.outcomes.append(None)
            self.prompts.append(asked.prompt)

            def deliver(outcome: Any) -> None:
                assert self.outcomes[place] is None
                self.outcomes[place] = outcome

            matcher = StopMatcher(stop, text_of) if stop else None
            sequences.append(Sequence(one, asked.prompt, deliver, frozenset({END}), matcher))
            scheduler.waiting.append(sequences[-1])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "Arrival", self.arrivals)
            patch.setattr(engine.forward, "run", fails_on_a_prompt)
            scheduler = module.Scheduler(engine.forward, schedule.slots, schedule.prefill_tokens, ahead=ahead)
            for turn in range(TURNS):
                if schedule.installs[turn]:
                    scheduler.catch_up()
                    engine.install(documents[schedule.documents[turn]])
                    ref = VersionRef(0, turn + 1)
                    self.served[ref] = schedule.documents[turn]
                    scheduler.new_version(ref, recompute=schedule.recompute)
                for asked in schedule.joins[turn]:
                    for member in asked.members:
                        ask(asked, *member)
                for place in schedule.aborts[turn]:
                    if place < len(sequences):
                        self.aborted.add(place)
                        scheduler.abort(sequences[place])
                if scheduler.has_work:
                    scheduler.step()
            while scheduler.has_work:
                scheduler.step()
        scheduler.catch_up()
        self.too_many = self.arrivals.drawn - scheduler.tokens_total

    def differs(self, other: "Played") -> int | None:
        """The first request with another outcome; one that was aborted may have ended before."""
        for place, (mine, theirs) in enumerate(zip(self.outcomes, other.outcomes, strict=True)):
            if place in self.aborted and (mine is None or theirs is None):
                continue
            if parts(mine) != parts(theirs):
                return place
        return None


class Kind:
    """Engines of one kind of model and schedule, and the documents that they install."""

    def __init__(self, name: str) -> None:
        make = spoiled if name == "spoiled" else tiny
        self.crowded = name == "crowded"
        self.models = [make(seed).double() for seed in range(3)]
        self.documents = [document(model) for model in self.models]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.unit.engines.test_decode_graphs.SLOTS", 4 if self.crowded else 40)
            patch.setattr("tests.unit.engines.test_decode_graphs.tiny", make)
            # In float64 a product of other rows rounds to the same float32.
            self.engines = [
                Engine(RecordedGraphs() if self.crowded else None, own_code=True, dtype=torch.float64)
                for _ in range(2)
            ]

    def play(self, seed: int, *, ahead: bool, module: Any = scheduler_module) -> Played:
        schedule = Schedule(seed, crowded=self.crowded)
        return Played(self.engines[ahead], schedule, self.documents, ahead=ahead, module=module)


KINDS = ["room", "crowded", "spoiled"]


@pytest.mark.parametrize("name", KINDS)
def test_random_schedules_give_what_an_engine_gives_that_waits_for_each_pass(name):
    """Equal to the last bit: tokens, log-probs, sets, spans, finish; of aborts, joins, installs and failures too."""
    kind = Kind(name)
    behind = too_many = compared = failed = spans = 0
    for seed in range(SCHEDULES):
        got, expected = (kind.play(seed, ahead=ahead) for ahead in (True, False))
        assert got.differs(expected) is None, seed
        assert expected.arrivals.behind == expected.too_many == 0
        behind += got.arrivals.behind
        too_many += got.too_many
        done = [outcome for outcome in got.outcomes if isinstance(outcome, Generation)]
        compared += sum(len(one.token_ids) for one in done)
        spans += sum(len(one.spans) > 1 for one in done)
        failed += sum(isinstance(outcome, EngineError) for outcome in got.outcomes)
    assert behind > 8 * SCHEDULES and too_many > 8 * SCHEDULES and compared > 40 * SCHEDULES and failed > 10
    assert spans > SCHEDULES or name == "crowded"


FAULTS = {
    "a token too many is kept": (
        "room",
        "                continue\n            self.tokens_total += 1",
        "                sequence.add(token, logprob, flight.sets.get(place))\n                continue\n"
        "            self.tokens_total += 1",
    ),
    "the end is of the row that the sequence had": ("room", "ended[row_of[sequence]]", "ended[place]"),
    "rows are those of the next pass": ("room", "_Flight(list(self.running),", "_Flight(self.running,"),
    "tokens stay where their sequences were": ("room", "self._last.index_copy_(0, written,", "(0, written,"),
    "a label is late": ("room", "\n        self.ref = ref", "\n        self.ref = self.ref if self.running else ref"),
    "a row is used while it holds what a token too many left": (
        "spoiled", "self._cached[moved + places]", "self._cached[moved]",
    ),
    "what a token too many left stays": (
        "spoiled", "if not all(map(math.isfinite, logprobs)):", "if None in ended.values():",
    ),
}  # fmt: skip


def faulty(old: str, new: str) -> types.ModuleType:
    """The scheduler's module with a change."""
    source = inspect.getsource(scheduler_module)
    assert source.count(old) == 1, old
    module = types.ModuleType("faulty_scheduler")
    sys.modules[module.__name__] = module  # where a dataclass looks its own up
    exec(compile(source.replace(old, new), "faulty_scheduler", "exec"), module.__dict__)
    return module


def test_the_module_without_a_fault_is_found_to_have_none():
    kind, module = Kind("spoiled"), faulty("ended[row_of[sequence]]", "ended[row_of[sequence]]")
    for seed in range(10):
        assert kind.play(seed, ahead=True, module=module).differs(kind.play(seed, ahead=False)) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_in_some_schedule(fault):
    name, old, new = FAULTS[fault]
    kind, module = Kind(name), faulty(old, new)
    for seed in range(SCHEDULES):
        expected = kind.play(seed, ahead=False)
        try:
            if kind.play(seed, ahead=True, module=module).differs(expected) is not None:
                return
        except (IndexError, ValueError):  # there is no such row
            return
    pytest.fail(f"nothing differs in {SCHEDULES} schedules")


@torch.inference_mode()
def test_an_install_that_does_not_catch_up_labels_tokens_wrongly():
    """The fault that an engine alone could make; and what finds it here is the comparison above."""
    kind = Kind("room")
    with pytest.MonkeyPatch.context() as patch:
        catch_up = scheduler_module.Scheduler.catch_up

        def only_in_a_step(self) -> None:
            if sys._getframe(1).f_code.co_name == "step":
                catch_up(self)

        patch.setattr(scheduler_module.Scheduler, "catch_up", only_in_a_step)
        found = [kind.play(seed, ahead=True).differs(kind.play(seed, ahead=False)) for seed in range(10)]
    assert any(place is not None for place in found)


def truth(
    models: list[torch.nn.Module], prompt: tuple[int, ...], done: Generation, served: dict[VersionRef, int]
) -> torch.Tensor:
    """Log-probs at temperature 1, each by the model of the token's label over the cache that earlier ones left."""
    model_at = [models[served[span.ref]] for span in done.spans for _ in range(span.start, span.end)]
    cache, logprobs, ids = DynamicCache(), [], list(prompt)
    for model, token in zip(model_at, done.token_ids, strict=True):
        logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(torch.log_softmax(logits, -1)[token])
        ids = [token]
    return torch.stack(logprobs)


class Crowd(Schedule):
    """A crowd through installs, of plain draws: what a run's timing decides, labels must tell."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, crowded=True)
        pick = random.Random(seed)
        self.recompute = False
        self.installs = [number == 0 or pick.random() < 0.4 for number in range(TURNS)]
        for asked in (one for turn in self.joins for one in turn):
            asked.members = [(new, own, Sampling(), stop) for new, own, _, stop in asked.members]


@torch.inference_mode()
def test_a_label_is_of_the_weights_that_drew_the_token_in_a_crowd_too():
    kind, crossed = Kind("crowded"), 0
    for seed in range(30):
        played = Played(kind.engines[1], Crowd(seed), kind.documents, ahead=True)
        for prompt, done in zip(played.prompts, played.outcomes, strict=True):
            if isinstance(done, Generation):
                crossed += len(done.spans) > 1
                expected = truth(kind.models, prompt, done, played.served)
                torch.testing.assert_close(torch.tensor(done.logprobs), expected.float(), atol=1e-5, rtol=0)
    assert crossed > 30


async def test_an_engine_behind_catches_up_before_an_install():
    model, other, gate = qwen3(), qwen3(5), GatedTokenizer(20)
    async with engine_for(model, gate, max_tokens=128, max_num_seqs=3) as engine:
        assert not engine._scheduler._ahead, "a CPU runs a pass where it is launched"
        engine._scheduler._ahead = True
        asked = [request(prompt_of(4 + seed), 60, seed=seed, stop=["never"] * (seed == 0)) for seed in range(5)]
        answers = [asyncio.create_task(engine.generate(one)) for one in asked]
        assert await asyncio.to_thread(gate.reached.wait, TIMEOUT_S)
        install = asyncio.create_task(engine.install(document(other), V2))
        await until(lambda: engine._swaps)
        gate.go.set()
        await install
        done = await asyncio.gather(*answers)
    assert [(span.ref, span.end) for span in done[0].spans] == [(V1, 20), (V2, 60)]  # one more was on its way
    for one, generation in zip(asked, done, strict=True):
        switch = sum(span.end - span.start for span in generation.spans if span.ref == V1)
        expected = two_model_logprobs(model, other, one.prompt_ids, generation.token_ids, switch)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=1e-5)


async def test_memory_that_is_given_back_while_a_pass_is_on_its_way_ends_its_sequences():
    model = qwen3()
    async with engine_for(model, max_tokens=256) as engine:
        engine._scheduler._ahead = True
        answer = asyncio.create_task(engine.generate(request(prompt_of(4), 200)))
        await until(lambda: engine.stats().tokens_total > 3)
        await engine.release()
        with pytest.raises(EngineError, match="released"):
            await answer
        assert engine._scheduler._flight is None
        await engine.install(document(model), V2)
        assert len((await engine.generate(request(prompt_of(4), 12))).token_ids) == 12


class Crossings(TorchDispatchMode):
    """Finds operations between the host and the meta device, which stands for a GPU, other than `upload`s."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {one.device.type for one in tree_leaves((args, kwargs, out)) if torch.is_tensor(one)}
        if len(devices) > 1:
            names = [frame.name for frame in traceback.extract_stack()]
            if "upload" in names:
                self.uploads += 1
            else:
                self.found.append(f"{func} in {names[-3:-1]}")
        return out


class FromNowhere:
    """A stand-in for `Arrival`: the meta device has no numbers, so every token is 7."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        assert tokens.device.type == logprobs.device.type == "meta"
        self._count = len(tokens)

    def read(self) -> tuple[list[int], list[float]]:
        return [7] * self._count, [-1.0] * self._count


@torch.inference_mode()
def test_a_launch_needs_no_number_of_the_device_and_copies_none_to_it_but_through_pinned_memory(monkeypatch):
    """A host that reads a meta tensor is an error. Groups join late and early, end, are aborted, and read again."""
    def fail(self: Any, n: int, error: Exception) -> None:
        raise error

    def made(values: Any, dtype: Any = None, device: Any = None, make: Any = torch.tensor) -> torch.Tensor:
        assert device is None, "no operation is seen that copies these numbers to the device"
        return make(values, dtype=dtype)

    monkeypatch.setattr(torch, "tensor", made)
    monkeypatch.setattr(scheduler_module, "Arrival", FromNowhere)
    monkeypatch.setattr(scheduler_module.Scheduler, "_drop_failed", fail)
    model = tiny(0).to("meta").requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    for capture in (None, PassesAgain()):
        scheduler = scheduler_module.Scheduler(Forward(model, 8, 40, capture=capture), 8, 64, ahead=True)
        scheduler.new_version(V1, recompute=False)
        samplings = [Sampling(), Sampling(0.0), Sampling(0.7, 0.9), Sampling(min_p=0.1)]
        done: list[Any] = []
        sequences = []
        with Crossings() as crossings:
            for step in range(12):
                for member in range(step % 4):
                    prompt = tuple(range(2, 5 + step // 3))
                    one = request(prompt, 3 + 2 * member, sampling=samplings[(step + member) % 4])
                    sequences.append(Sequence(one, prompt, done.append, frozenset({END}), None))
                    scheduler.waiting.append(sequences[-1])
                if step == 6:
                    scheduler.abort(scheduler.running[0])
                    scheduler.catch_up()
                    scheduler.new_version(V2, recompute=True)
                if scheduler.has_work:
                    scheduler.step()
            while scheduler.has_work:
                scheduler.step()
        assert crossings.found == [] and crossings.uploads > 50
        assert len(done) == len(sequences) - 1 and all(isinstance(one, Generation) for one in done)
