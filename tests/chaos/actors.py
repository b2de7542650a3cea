"""Actors without a model, several in one process: the real client, session, outbox, weight fetches and installer."""

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from actors.engines.base import EngineStats, InstallTimes
from actors.weights.installer import Installer
from streamrl.errors import StreamrlError
from streamrl.messages import (
    Ack,
    Announce,
    Group,
    Installed,
    Lease,
    LeaseRef,
    Leases,
    Member,
    MemberStatus,
    Outcome,
    ReturnReason,
    Span,
    Turn,
    VersionRef,
    Welcome,
)
from streamrl.messages.codec import pack_ids, pack_logprobs
from streamrl.transport.client import HubClient
from streamrl.transport.outbox import Outbox
from streamrl.transport.session import EXIT_FENCED, ActorSession, Deliver, Effect, LinkClosed, Progress
from streamrl.weights.transport import WeightSource
from tests.chaos import crash_points
from tests.chaos.history import History
from tests.chaos.learner import content_digest
from tests.chaos.processes import ChaosSpec

MAX_LEASES = 3
NUM_TOKENS = 4
_PROMPT, _IDS, _LOGPROBS = pack_ids([1, 2]), pack_ids([3, 4, 5, 6]), pack_logprobs([-0.5] * NUM_TOKENS)


class RecordedOutbox(Outbox):
    """Tells the history what the hub has answered."""

    def __init__(self, history: History, incarnation: int, *limits: int) -> None:
        super().__init__(*limits)
        self._history, self._incarnation = history, incarnation

    def settle(self, upto: int, ranges: Any = ()) -> None:
        ranges = list(ranges)
        self._record("settled", [seq for seq in self._matching(upto, ranges) if not self._entries[seq].settled])
        super().settle(upto, ranges)

    def forget(self, upto: int, ranges: Any = ()) -> None:
        ranges = list(ranges)
        self._record("durable", self._matching(upto, ranges))
        super().forget(upto, ranges)

    def _record(self, event: str, seqs: list[int]) -> None:
        if seqs:
            self._history.add(event, inc=self._incarnation, seqs=seqs)


class RecordedSession(ActorSession):
    """The real session; the history learns what it sends and is told."""

    def __init__(self, history: History, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._history = history
        self.outbox = RecordedOutbox(history, self.incarnation, self.limits.outbox_groups, self.limits.outbox_bytes)

    def submit(self, group: Group, now: float) -> list[Effect]:
        members = [one.index for one in group.members if one.status != MemberStatus.ABORTED]
        self._history.add("send", inc=self.incarnation, seq=self.outbox.next_seq, group=group.group_id,
                          members=members)
        return super().submit(group, now)

    def report_installed(self, message: Installed, now: float) -> list[Effect]:
        return super().report_installed(message, now)

    def _acked(self, ack: Ack, now: float) -> list[Effect]:
        for one in ack.rejected if ack.incarnation == self.incarnation else ():
            self._history.add("rejected", inc=self.incarnation, seq=one.seq, reason=one.reason)
        return super()._acked(ack, now)

    def _welcomed(self, welcome: Welcome, now: float) -> list[Effect]:
        self._history.add("join", inc=self.incarnation, actor=self.actor_id, epoch=welcome.learner_epoch)
        return super()._welcomed(welcome, now)


@dataclass
class FakeEngine:
    """Holds the version that it was given, and generates nothing."""

    history: History
    incarnation: int
    name: str = "fake"
    max_num_seqs: int = 1
    installed: VersionRef | None = None
    roots: dict[VersionRef, str] = field(default_factory=dict)

    async def install(self, tensors: Mapping[str, torch.Tensor], ref: VersionRef) -> InstallTimes:
        self.history.add("install", inc=self.incarnation, epoch=ref.learner_epoch, version=ref.version,
                         root=self.roots.get(ref, ""), content=content_digest(tensors["weight"]))
        self.installed = ref
        return InstallTimes(0.0, 0.0)

    def stats(self) -> EngineStats:
        return EngineStats()


@dataclass
class FakeActor:
    """One incarnation: takes leases, waits a moment, and sends what a model would have generated."""

    spec: ChaosSpec
    history: History
    actor_id: str
    rng: random.Random
    work: dict[LeaseRef, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> LinkClosed:
        """Until the hub ends it."""
        incarnation = int.from_bytes(os.urandom(7), "little") | 1
        transports = ("zmq",) if self.rng.random() < 0.5 else ("shm", "zmq")
        session = RecordedSession(
            self.history, self.actor_id, incarnation, engine="fake", max_leases=MAX_LEASES, transports=transports,
            software="chaos", random_seed=self.rng.getrandbits(32),
        )
        self.client = HubClient(f"tcp://{self.spec.far}:{self.spec.hub_port}", session)
        self.engine, self.session = FakeEngine(self.history, incarnation), session
        self.source = WeightSource(zmq.Context.instance(), transports=transports)
        self.installer = Installer(self.engine, self.source.fetch, fetch_deadline_s=5.0, on_close=self.source.close)
        self.welcome: Welcome | None = None
        self.client.start()
        try:
            while not isinstance(event := await self.client.events.get(), LinkClosed):
                self._handle(event)
        finally:
            for task in self.work.values():
                task.cancel()
            self.work.clear()
            self.installer.close()
            self.client.close()
        self.history.add("exit", inc=incarnation, actor=self.actor_id, code=event.exit_code, detail=event.detail)
        return event

    def _handle(self, deliver: Deliver) -> None:
        match deliver.event:
            case Welcome() as welcome:
                self.welcome = welcome
                self.source.pull_token, self.source.limits = welcome.pull_token, welcome.limits
                for ref, keep in welcome.held:
                    if not keep:
                        self._cancel(ref)
                if welcome.manifest is not None:
                    self._spawn(self._install(welcome.manifest, welcome.offers))
            case Announce() as announce:
                self._spawn(self._install(announce.manifest, announce.offers))
            case Leases() as leases:
                for ref in leases.revoked:
                    self._cancel(ref)
                for lease in leases.grants:
                    if lease.ref not in self.work:
                        self.work[lease.ref] = self._spawn(self._work(lease))
                self._progress()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(_log_failure)
        return task

    def _cancel(self, ref: LeaseRef) -> None:
        task = self.work.pop(ref, None)
        if task is not None:
            task.cancel()
        self._progress()

    def _progress(self) -> None:
        ready = self.engine.installed is not None
        self.client.update(Progress(
            max_leases=MAX_LEASES, free=max(0, MAX_LEASES - len(self.work)) if ready else 0, running=len(self.work),
            held=tuple(self.work),
        ))

    async def _install(self, manifest: Any, offers: Any) -> None:
        assert self.welcome is not None and self.welcome.layout is not None
        self.engine.roots[manifest.ref] = manifest.root.hex()
        try:
            report = await self.installer.install(manifest, offers, self.welcome.layout)
        except StreamrlError as error:
            logging.getLogger("chaos").warning("%s does not install %s: %s", self.actor_id, manifest.ref, error)
            return
        if report is not None:
            self.client.report_installed(report)
            self._progress()

    async def _work(self, lease: Lease) -> None:
        began = self.engine.installed
        slow = self.rng.random() < 0.01
        await asyncio.sleep(self.rng.uniform(1.0, 2.0) if slow else self.rng.uniform(0.001, 0.03))
        self.work.pop(lease.ref, None)
        fate = self.rng.random()
        if began is None or self.engine.installed is None or fate < 0.01:
            reason = ReturnReason.ENV_ERROR if fate < 0.003 else ReturnReason.DRAIN
            self._send(lease, (), began, Outcome.RETURNED, reason)
        elif fate < 0.5 and len(lease.members) > 1:
            half = len(lease.members) // 2
            self._send(lease, lease.members[:half], began, Outcome.PARTIAL)
            await asyncio.sleep(0)
            self._send(lease, lease.members[half:], began, Outcome.COMPLETE)
        else:
            self._send(lease, lease.members, began, Outcome.COMPLETE, aborted=fate > 0.99)
        self._progress()

    def _send(
        self, lease: Lease, members: tuple[int, ...], began: VersionRef | None, outcome: Outcome,
        reason: ReturnReason = ReturnReason.NONE, aborted: bool = False,
    ) -> None:
        """Tokens of the version at the beginning, then of the one that is installed now."""
        spans = () if began is None else _spans(began, self.engine.installed or began)
        self.client.send_group(Group(
            incarnation=0, seq=0, group_id=lease.group_id, attempt=lease.attempt, outcome=outcome, reason=reason,
            detail="", sampling=lease.sampling, stats={}, members=tuple(
                Member(
                    index=index, prompt_ids=_PROMPT, token_ids=_IDS, logprobs=_LOGPROBS, mask=((0, NUM_TOKENS),),
                    status=MemberStatus.ABORTED if aborted and index == members[0] else MemberStatus.FINISHED,
                    versions=spans, turns=(Turn(0, NUM_TOKENS, float(index)),), reward=float(index), scores={},
                    finish="stop",
                ) for index in members
            ),
        ))


def _spans(first: VersionRef, last: VersionRef) -> tuple[Span, ...]:
    if first == last:
        return (Span(first.learner_epoch, first.version, 0, NUM_TOKENS),)
    return (Span(first.learner_epoch, first.version, 0, 2), Span(last.learner_epoch, last.version, 2, NUM_TOKENS))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logging.getLogger("chaos").error("an actor's task failed", exc_info=error)


def main(spec: ChaosSpec, process: int, life: int) -> int:
    """One process of actors; an incarnation that was evicted is followed by another, one that was fenced is not."""
    spec.log_to(f"actors-{process}")
    history = History(spec.history, "actor")
    crash_points.arm("actor", spec.armed, history)
    asyncio.run(_run(spec, history, process, life))
    return 0


async def _run(spec: ChaosSpec, history: History, process: int, life: int) -> None:
    async def live(number: int) -> None:
        rng = random.Random(f"{spec.seed} {process} {number} {life}")
        while (await FakeActor(spec, history, f"actor-{process}-{number}", rng).run()).exit_code not in (
            0, EXIT_FENCED
        ):
            pass

    await asyncio.gather(*(live(number) for number in range(spec.actors_per_process)))

