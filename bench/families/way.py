"""The whole way of one family: what a learner and an actor of a run do with its model, each by the code of a run.

Whatever differs from transformers' own eager code, one row at a time, is a `Difference`, which names the step.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.engines.base import AdapterSpec, Engine, EngineSpec, GenerateRequest, build_engine
from actors.weights.base_weights import HeldBase, install_version
from actors.weights.probe import first_difference
from bench.families.ranks import Task, run_ranks
from bench.families.steps import BUCKET_BYTES, LORA, NEW_TOKENS, V1, V2, adapt, packed_logprobs, train, trajectory
from learner.data.trajectories import Trajectory
from learner.model.adapter.lora import adapter_parameters
from learner.model.policy import Policy, load_policy, policy_tensors, score_rows, score_shared
from learner.publish.export import export_model
from learner.publish.publisher import Publisher, publish_base
from learner.ranks.mesh import Ranks
from streamrl.architectures.miniature import check_rows
from streamrl.errors import ConfigError, EngineError
from streamrl.messages import Layout, Manifest, Sampling, VersionRef
from streamrl.weights.adapter import adapted_layers, rank_of
from streamrl.weights.assets import pack_assets, unpack_assets
from streamrl.weights.document import Document
from streamrl.weights.shm.transport import ShmPublisher, shm_offer
from streamrl.weights.transport import WeightSource

LENGTHS = (26, 7, 15)
MOST_LOGPROB, MOST_GRADIENT, MOST_WEIGHT, MOST_HALF = 5e-5, 2e-5, 2e-5, 0.3
"""Nats; of the largest gradient; of a weight after a step by two ranks instead of one; nats, as a mean, in bfloat16."""
CUT = {"gemma3n_text": (5e-4, 5e-3)}
"""Wider limits of log-probs and gradients, for activations cut at a threshold that rounding can cross."""
MAX_TOKENS = 64


class Difference(Exception):
    """A step of the way gives something else than plain transformers; the text begins with the step."""


class Refused(Exception):
    """Learner or engine refuse the model before anything is trained."""


@dataclass
class Way:
    """One family's way, with the folder that it leaves things in.

    Attributes:
        model: a folder with the tiny model.
        engine: name of the engine.
        all_of_it: also in bfloat16 and with an adapter, which do not depend on ties.
        found: largest differences by step, for the result.
        roots: of the documents that one rank published first.
    """

    family: str
    model: Path
    work: Path
    engine: str = "native"
    all_of_it: bool = True
    found: dict[str, float] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.most_logprob, self.most_gradient = CUT.get(self.family, (MOST_LOGPROB, MOST_GRADIENT))

    def go(self) -> dict[str, Any]:
        """The whole comparison. Raises Difference, or the exception of the run's code."""
        plain = plain_model(self.model)
        rows = check_rows(plain.get_output_embeddings().weight.shape[0], LENGTHS)
        policy = self._load(share_prompts=True)
        self._scores(policy, plain, rows)
        with step("export"):
            export_model(policy, self.model, self.work / "untrained")
        self._equal("export", plain_model(self.work / "untrained"), plain, rows)
        batch = asyncio.run(self._whole_model(policy, plain, rows))
        adapted = self._adapter(rows, batch) if self.all_of_it else None
        if self.engine == "native":
            self._two_ranks(rows, batch, lora=adapted == "")
        return {"lora": adapted, "differences": {name: float(f"{value:.2g}") for name, value in self.found.items()}}

    def _load(self, **options: Any) -> Policy:
        try:
            return load_policy(self.model, max_tokens=MAX_TOKENS, **options)
        except ConfigError as error:
            raise Refused(str(error).removeprefix(f"{self.model}: ")) from error

    def _scores(self, policy: Policy, plain: Any, rows: Sequence[Tensor]) -> None:
        """Packed log-probs and their gradients, and rows whose common beginning is packed once."""
        with step("score"):
            expected, scored = plain_logprobs(plain, rows), packed_logprobs(policy, rows)
            self._close("score", scored, expected, self.most_logprob)
            wanted, found = gradients(plain, expected), gradients(policy.model, scored)
            largest = max(float(one.abs().max()) for one in wanted.values())
            for name in wanted.keys() | found.keys():
                mine, theirs = (one.get(name, torch.zeros(())) for one in (found, wanted))
                self._close("gradient", mine / largest, theirs / largest, self.most_gradient)
            policy.zero_grad()
            if policy.shares_prompts:
                alike = [torch.cat([rows[0][:5], row[5:]]) for row in rows]
                apart, shared = (score(policy.model, policy.rule, alike) for score in (score_rows, score_shared))
                self._close("shared prompts", shared, apart, self.most_logprob)

    async def _whole_model(self, policy: Policy, plain: Any, rows: Sequence[Tensor]) -> list[Trajectory]:
        """Publish, install, generate, train, and again; the batch that was generated and trained on."""
        with self._wire(policy_tensors(policy.model)) as wire:
            async with self._serving() as engine:
                with step("install"):
                    await install_version(engine, document := wire.published(V1), V1, None)
                    self.roots["whole"] = document.manifest.root.hex()
                await self._serves(engine, plain, rows)
                batch = await self._batch(engine, plain, rows)
                with step("train"):
                    train(policy, batch, Ranks())
                    export_model(policy, self.model, self.work / "trained")
                trained = plain_model(self.work / "trained")
                self._equal("reload", trained, policy.model, rows)
                with step("install a trained version"):
                    await install_version(engine, wire.published(V2), V2, None)
                await self._serves(engine, trained, rows)
        if self.all_of_it:
            await self._half(policy, trained, rows)
        return batch

    async def _half(self, policy: Policy, plain: Any, rows: Sequence[Tensor]) -> None:
        """The same version, sent and served in bfloat16."""
        with self._wire(policy_tensors(policy.model), torch.bfloat16) as wire:
            async with self._serving(dtype=torch.bfloat16) as engine:
                with step("bfloat16"):
                    await install_version(engine, document := wire.published(V2), V2, None)
                    scored = await scores(engine, rows)
                    self._mean("bfloat16", scored, plain_logprobs(plain, rows))
                    if hasattr(engine, "live_tensors") and (text := first_difference(engine.live_tensors(), document)):
                        raise Difference(text)

    def _adapter(self, rows: Sequence[Tensor], batch: Sequence[Trajectory]) -> str:
        """The way with an adapter; why this family takes none, "" if it does."""
        try:
            policy = self._load(adapt=partial(adapt, seed=7))
        except Refused as error:
            return str(error)
        asyncio.run(self._adapted(policy, rows, batch))
        return ""

    async def _adapted(self, policy: Policy, rows: Sequence[Tensor], batch: Sequence[Trajectory]) -> None:
        with self._wire(adapter_parameters(policy)) as wire, step("lora"):
            options = {"wire_dtype": torch.float32, "bucket_bytes": BUCKET_BYTES, "ranks": Ranks(), "shm": wire.shm}
            base, path = publish_base(policy, LORA, **options)
            self.roots["base"] = base.manifest.root.hex()
            held = HeldBase(wire.fetched(base.manifest, Path(path), base.layout), base.scale)
            layers = tuple(adapted_layers(spec.name for spec in wire.publisher.layout.tensors))
            spec = AdapterSpec(layers, rank_of(wire.publisher.layout), base.scale)
            async with self._serving(adapter=spec) as engine:
                for ref in (V1, V2):
                    if ref is V2:
                        train(policy, batch, Ranks())
                    export_model(policy, self.model, self.work / "adapted", lora=LORA)
                    merged = plain_model(self.work / "adapted")
                    with torch.no_grad():
                        scored, expected = packed_logprobs(policy, rows), plain_logprobs(merged, rows)
                    self._close("lora", scored, expected, self.most_logprob)
                    await install_version(engine, wire.published(ref), ref, held)
                    await self._serves(engine, merged, rows)

    async def _serves(self, engine: Engine, plain: Any, rows: Sequence[Tensor]) -> None:
        """Scores and greedy tokens of prompts that share the engine's passes."""
        with step("engine"):
            if hasattr(engine, "score"):
                self._close("engine", await scores(engine, rows), plain_logprobs(plain, rows), self.most_logprob)
            prompts = [row.tolist() for row in rows]
            done = await asyncio.gather(*(
                engine.generate(request(prompt, temperature=0.0, seed=place)) for place, prompt in enumerate(prompts)
            ))
            for prompt, one in zip(prompts, done, strict=True):
                self._greedy(plain, prompt, one.token_ids)

    @torch.no_grad()
    def _greedy(self, plain: Any, prompt: list[int], tokens: Sequence[int]) -> None:
        """Each token has the largest logit after those before it, or one that rounding cannot tell from it."""
        ids = torch.tensor([[*prompt, *tokens]])
        logprobs = plain(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        missed = logprobs.max(-1).values - logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        self._close("greedy", missed, torch.zeros_like(missed), self.most_logprob)

    async def _batch(self, engine: Engine, plain: Any, rows: Sequence[Tensor]) -> list[Trajectory]:
        """Two answers to each of four prompts; their recorded log-probs are those of the model."""
        with step("sample"):
            prompts = [rows[place % len(rows)][: 5 + 2 * place].tolist() for place in range(4)]
            keys = [(group, index) for group in range(len(prompts)) for index in range(2)]
            done = await asyncio.gather(*(
                engine.generate(request(prompts[group], temperature=1.0, seed=10 * group + index))
                for group, index in keys
            ))
            batch = []
            for (group, index), one in zip(keys, done, strict=True):
                prompt = prompts[group]
                logprobs = plain_logprobs(plain, [torch.tensor([*prompt, *one.token_ids])])[len(prompt) - 1 :]
                self._close("sample", torch.tensor(one.logprobs), logprobs, self.most_logprob)
                batch.append(trajectory(group, index, prompt, one.token_ids, one.logprobs))
            return batch

    def _two_ranks(self, rows: Sequence[Tensor], batch: Sequence[Trajectory], *, lora: bool) -> None:
        with step("two ranks"):
            found = run_ranks(Task(self.model, self.work, rows, batch, lora))
            expected = plain_logprobs(plain_model(self.model), rows)
            self._close("two ranks", torch.tensor(found["logprobs"]), expected, self.most_logprob)
            self._mean("two ranks, bfloat16", torch.tensor(found["half"]), expected)
            if found["root"] != self.roots["whole"] or (lora and found["base"] != self.roots["base"]):
                raise Difference("they publish other bytes than one")
            for theirs, mine in (("of-two", "trained"), *([("adapted-of-two", "adapted")] if lora else [])):
                one, two = (dict(policy_tensors(plain_model(self.work / name))) for name in (mine, theirs))
                for name in one.keys() | two.keys():
                    self._close("weights of two ranks", two[name], one[name], MOST_WEIGHT)

    @contextmanager
    def _wire(self, tensors: Sequence[tuple[str, Any]], dtype: torch.dtype = torch.float32) -> Iterator[Wire]:
        folder = self.work / "documents"
        with ShmPublisher(folder, "families") as shm:
            wire = Wire(shm, Publisher(tensors, wire_dtype=dtype, bucket_bytes=BUCKET_BYTES, shm=shm))
            try:
                yield wire
            finally:
                wire.source.close()
        shutil.rmtree(folder, ignore_errors=True)

    def _serving(self, **options: Any) -> Any:
        return serving(self.engine, self.model, self.work / "actor", **options)

    def _close(self, name: str, mine: Tensor, theirs: Tensor, most: float) -> None:
        difference = float((mine - theirs).detach().abs().max())
        self.found[name] = max(self.found.get(name, 0.0), difference)
        if not difference <= most:
            raise Difference(f"{name} differs by {difference:.2g} (most {most})")

    def _mean(self, name: str, mine: Tensor, theirs: Tensor) -> None:
        self.found[name] = difference = float((mine - theirs).abs().mean())
        if not difference <= MOST_HALF:
            raise Difference(f"{name} differs by {difference:.2g} on average (most {MOST_HALF})")

    def _equal(self, name: str, one: Any, other: Any, rows: Sequence[Tensor]) -> None:
        """Two models of transformers' own code with equal tensors and equal logits, to the bit."""
        with step(name):
            mine, theirs = (dict(policy_tensors(model)) for model in (one, other))
            if mine.keys() != theirs.keys() or not all(torch.equal(mine[key], theirs[key]) for key in mine):
                raise Difference("the tensors are not those of the model")
            other.set_attn_implementation("eager")
            logits = [model(input_ids=rows[0][None], use_cache=False).logits for model in (one, other)]
            if not torch.equal(*logits):
                raise Difference(f"logits differ by {float((logits[0] - logits[1]).abs().max()):.2g}")


class Wire:
    """The run's directory of documents, and an actor's way to them over shared memory."""

    def __init__(self, shm: ShmPublisher, publisher: Publisher) -> None:
        self.shm, self.publisher = shm, publisher
        self.source = WeightSource(zmq.Context.instance(), transports=("shm",))

    def published(self, ref: VersionRef) -> Document:
        """The weights as they are now, published, fetched and verified."""
        done = self.publisher.publish(ref)
        assert done is not None
        return self.fetched(done.manifest, done.path, self.publisher.layout)

    def fetched(self, manifest: Manifest, path: Path, layout: Layout) -> Document:
        return self.source.fetch(manifest, [shm_offer(path)], layout).document


@contextmanager
def step(name: str) -> Iterator[None]:
    """A step of the way: an error inside becomes a Difference that begins with its name."""
    try:
        yield
    except Refused:
        raise
    except Difference as error:
        raise error if str(error).startswith(f"{name}: ") else Difference(f"{name}: {error}") from None
    except Exception as error:
        raise Difference(f"{name}: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def serving(name: str, model: Path, folder: Path, **options: Any) -> AsyncIterator[Engine]:
    """An engine as an actor builds it: from the files that travel, without weights."""
    unpack_assets(pack_assets(model), folder)
    try:
        engine = build_engine(name, EngineSpec(
            model_dir=folder, tokenizer=None, max_num_seqs=len(LENGTHS), max_tokens=MAX_TOKENS,
            max_new_tokens=NEW_TOKENS, num_threads=1, **options,
        ))
    except EngineError as error:
        raise Refused(str(error)) from error
    try:
        yield engine
    finally:
        await engine.close()


def request(prompt: Sequence[int], *, temperature: float, seed: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=prompt, sampling=Sampling(temperature=temperature), seed=seed, max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
    )


async def scores(engine: Any, rows: Sequence[Tensor]) -> Tensor:
    """The engine's log-probs of every token but each row's first."""
    return torch.tensor([
        one for row in rows for one in await engine.score(row.tolist(), start=1, temperature=1.0)
    ])


def plain_model(folder: Path) -> Any:
    """The model as transformers loads it, with its own eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def plain_logprobs(model: Any, rows: Sequence[Tensor]) -> Tensor:
    """Log-prob of every token but each row's first, each row alone; with a gradient."""
    return torch.cat([
        model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        for row in rows
    ])


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    """Gradient of a sum of log-probs with weights of both signs, by parameter."""
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
