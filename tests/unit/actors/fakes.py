"""A worker with everything real but the socket: engine, installer, renderer, threads; the hub's side is a list."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.engines.base import Engine
from actors.engines.native.weights import checkpoint_tensors
from actors.env_calls.instances import Instances
from actors.episode import EpisodeRules, EpisodeRunner
from actors.render import Renderer
from actors.runtime import ActorRuntime
from actors.weights.installer import Installer
from actors.worker import Worker
from streamrl.environment import ChatMessage, Record, Step
from streamrl.messages import (
    Announce,
    Group,
    HubHeartbeat,
    Installed,
    InstallSource,
    Layout,
    Lease,
    Leases,
    Limits,
    Manifest,
    Message,
    Outcome,
    Purpose,
    ReturnReason,
    Sampling,
    VersionRef,
    Welcome,
)
from streamrl.transport.session import Deliver, LinkClosed, Progress
from streamrl.weights.document import Document
from streamrl.weights.manifest import bucket_digest, document_nbytes, make_layout, make_manifest
from streamrl.weights.transport import FetchedVersion
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import until

torch.set_num_threads(1)
V1, V2, V3 = VersionRef(1, 1), VersionRef(1, 2), VersionRef(1, 3)
LETTERS = "abcdefghijklmnopqrstuvwxyz .,:;!?0123456789ABCDEFGHIJKLMNOPQRST"[:62]
VOCAB = 64


# --- a task and what plays it --------------------------------------------------------------------------------------


class TableTask:
    """Environments given as two functions, so that each test says what happens in them."""

    name = "table"

    def __init__(
        self, step: Callable[[str], Any], reset: Callable[[Record], Any] = lambda record: [ChatMessage("user", "hi")]
    ) -> None:
        self._step, self._reset = step, reset

    def num_records(self, split: str) -> int:
        return 1

    def record(self, split: str, index: int) -> Record:
        return {}

    def env(self) -> Any:
        task = self

        class Plain:
            def reset(self, record: Record) -> Any:
                return task._reset(record)

            def step(self, action: str) -> Any:
                return task._step(action)

        return Plain()


class AsyncTask(TableTask):
    """As above, with `async` methods."""

    def env(self) -> Any:
        task = self

        class Async:
            async def reset(self, record: Record) -> Any:
                return task._reset(record)

            async def step(self, action: str) -> Any:
                return await task._step(action)

        return Async()


def tokenizer() -> PreTrainedTokenizerFast:
    """Token 0 pads, token 1 ends, the others are one character each."""
    vocab = {"<pad>": 0, "<end>": 1, **{letter: place for place, letter in enumerate(LETTERS, 2)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


TOKENIZER = tokenizer()


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def says(text: str) -> Callable[[Sequence[int], int, VersionRef], list[int]]:
    """A reply for the scripted engine: always this."""
    return lambda prompt, seed, version: ids_of(text)


def make_runner(
    task: Any, engine: Engine, *, num_threads: int = 4, renderer: Renderer | None = None,
    instances: Instances | None = None, **rules: Any,
):
    rules = {"max_prompt_tokens": 16, "max_new_tokens": 8, "max_turns": 1, **rules}
    return EpisodeRunner(
        task, engine, renderer or Renderer(TOKENIZER), EpisodeRules(**rules), num_threads=num_threads,
        instances=instances,
    )


async def installed_engine(reply: Any = None, **options: Any) -> ScriptedEngine:
    engine = ScriptedEngine(reply or says("ok"), **options)
    await engine.install({}, V1)
    return engine


def always(**fields: Any) -> TableTask:
    return TableTask(lambda action: Step(**{"reward": 1.0, **fields}))


def lease(group_id: int = 0, *, members: int = 1, purpose: Purpose = Purpose.TRAIN, **fields: Any) -> Lease:
    numbers = tuple(range(members))
    options: dict[str, Any] = {
        "group_id": group_id, "attempt": 0, "prompt_index": group_id, "pass_index": 0,
        "prompt": json.dumps({"id": group_id}).encode(), "members": numbers, "seeds": numbers, "min_version": V1,
        "sampling": Sampling(), "ttl_s": 60.0, "purpose": purpose,
    }
    return Lease(**{**options, **fields})


# --- the worker and the hub's side ---------------------------------------------------------------------------------


class FakeClient:
    """The worker's end of a link without a link: what would be sent is kept, what a hub would say is put in."""

    endpoint = "tcp://nowhere:0"

    def __init__(self) -> None:
        self.events: asyncio.Queue[Deliver | LinkClosed] = asyncio.Queue()
        self.groups: list[Group] = []
        self.installed: list[VersionRef] = []
        self.reports: list[Installed] = []
        self.free_at_reports: list[int] = []
        self.released: list[int] = []
        self.progress = Progress()
        self.drained_with: tuple[int, tuple[Any, ...]] | None = None
        self.closed = False

    def start(self) -> None:
        pass

    def send_group(self, group: Group) -> None:
        assert not self.closed
        self.groups.append(group)

    def report_installed(self, message: Installed) -> None:
        assert message.ok, message.error
        self.installed.append(message.target)
        self.reports.append(message)
        self.free_at_reports.append(self.progress.free)

    def report_released(self, turn: int) -> None:
        self.released.append(turn)

    def update(self, progress: Progress) -> None:
        self.progress = progress
        if self.drained_with is not None and not progress.held:
            self.events.put_nowait(LinkClosed(0, "left cleanly"))

    def drain(self, reason: str, deadline_s: float | None = None) -> None:
        """As a link whose hub settles everything at once: it closes when nothing is held any more."""
        self.drained_with = (len(self.groups), self.progress.held)
        self.update(self.progress)

    def close(self) -> None:
        self.closed = True

    # --- what the hub says

    def says(self, message: Message) -> None:
        self.events.put_nowait(Deliver(message))

    def grants(self, *leases: Lease, revoked: tuple[tuple[int, int], ...] = ()) -> None:
        self.says(Leases(leases, revoked))

    def heartbeat(self, min_useful: VersionRef) -> None:
        self.says(HubHeartbeat(1, min_useful.learner_epoch, min_useful.version, min_useful, ""))

    def returns(self) -> dict[int, ReturnReason]:
        """Group id to the reason, of what was handed back."""
        return {g.group_id: g.reason for g in self.groups if g.outcome == Outcome.RETURNED}


class Weights:
    """Documents of one model, of these tensors, or of four bytes that any engine without a model takes; nothing is
    transferred."""

    def __init__(
        self, model: torch.nn.Module | None = None, tensors: dict[str, torch.Tensor] | None = None
    ) -> None:
        tensors = tensors or {"w": torch.zeros(1)}
        if model is not None:
            tensors = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model).items()}
        self.layout = make_layout(((name, "float32", t.shape) for name, t in tensors.items()), bucket_bytes=1 << 20)
        by_name = {spec.name: tensors[spec.name].numpy().tobytes() for spec in self.layout.tensors}
        self.body = bytearray(b"".join(by_name.values()))
        assert len(self.body) == document_nbytes(self.layout)

    def manifest(self, ref: VersionRef) -> Manifest:
        digests, start = [], 0
        for nbytes in self.layout.bucket_bytes:
            digests.append(bucket_digest(memoryview(self.body)[start : start + nbytes]))
            start += nbytes
        return make_manifest(self.layout, ref, None, digests)

    def fetch(self, manifest: Manifest, offers: Any, layout: Layout, **_: Any) -> FetchedVersion:
        return FetchedVersion(Document(self.body, manifest, layout).verify(), InstallSource.SHM, 0.0, 0.0)


class Actor:
    """A worker at work, and both its ends."""

    def __init__(
        self, engine: Engine, task: Any, *, weights: Weights | None = None, limits: Limits | None = None,
        max_leases: int = 8, num_threads: int = 4, clock: Callable[[], float] | None = None, **rules: Any,
    ) -> None:
        self.engine, self.client, self.weights = engine, FakeClient(), weights or Weights()
        self.limits = limits or Limits(vocab_size=VOCAB)
        self.runners = [make_runner(task, engine, num_threads=num_threads, **rules) for _ in range(2)]
        self.worker = Worker(self.client, self._build, **({"clock": clock} if clock else {}))  # type: ignore[arg-type]
        self._max_leases = max_leases
        self.fits: Callable[[Welcome], bool] = lambda welcome: True
        self.turn = 0
        self.life: asyncio.Future[LinkClosed] = asyncio.get_running_loop().create_future()

    def _build(self, welcome: Welcome) -> ActorRuntime:
        installer = Installer(self.engine, self.weights.fetch)
        return ActorRuntime(
            self.engine, installer, *self.runners, set_welcome=lambda welcome: None, max_leases=self._max_leases,
            fits=lambda later: self.fits(later),
        )

    def welcome(self, ref: VersionRef = V1) -> Welcome:
        return Welcome(
            protocol=1, run_id="r", learner_epoch=1, version=ref.version, lineage=(), limits=self.limits, task=b"{}",
            layout=self.weights.layout, manifest=self.weights.manifest(ref), offers=(), pull_token=bytes(16),
            assets_nbytes=0, assets_digest=bytes(16), settled_upto=0, settled=(), durable_upto=0, durable=(), held=(),
            turn=self.turn,
        )

    async def announce(self, ref: VersionRef) -> None:
        self.client.says(Announce(self.weights.manifest(ref), ()))
        await until(lambda: ref in self.client.installed)

    async def finished(self, num_groups: int) -> list[Group]:
        await until(lambda: len(self.client.groups) >= num_groups)
        return self.client.groups


@asynccontextmanager
async def actor(engine: Engine, task: Any, **options: Any):
    """A worker that has installed version 1; ended at the end, if it is not by then."""
    one = Actor(engine, task, **options)
    one.life = asyncio.ensure_future(one.worker.run())
    one.client.says(one.welcome())
    try:
        await until(lambda: V1 in one.client.installed or one.life.done())
        yield one
    finally:
        one.client.events.put_nowait(LinkClosed(0, "the test is over"))
        await one.life
