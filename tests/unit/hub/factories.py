"""Small honest leases, groups and actors for the hub's tests. No mocks: everything goes through the real codec."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from weakref import WeakKeyDictionary

import hypothesis

from learner.hub.ledger.accept import AcceptResult
from learner.hub.ledger.apply import commit
from learner.hub.ledger.ledger import Ledger, LedgerSettings
from learner.hub.ledger.snapshots import read_snapshot
from learner.hub.ledger.tables.evals import EvalSource
from learner.hub.ledger.tables.groups import GroupState, HeldGroup
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub.ledger.tables.versions import cut_lineage
from streamrl.lag_rule import LagRule
from streamrl.messages import (
    Ack,
    ActorHeartbeat,
    ActorState,
    Group,
    Hello,
    Lease,
    LeaseRef,
    Limits,
    Lineage,
    Manifest,
    Member,
    MemberStatus,
    Outcome,
    ReturnReason,
    Sampling,
    SeqRange,
    Span,
    Turn,
    VersionRef,
)
from streamrl.messages.codec import encode, pack_ids, pack_logprobs
from streamrl.stream.records import BatchCut, Record, RunStarted, StepTaken

STEADY = hypothesis.settings(deadline=None, derandomize=True, database=None)
"""For every property test here: the same examples each time, and no outcome that depends on the machine's load."""
NUM_RECORDS = 1000
LIMITS = Limits(vocab_size=100, max_prompt_tokens=64, max_new_tokens=64)


def settings(**changes: object) -> LedgerSettings:
    """Small settings; the numbers of the lag rule are given by name too."""
    values = {"groups_per_batch": 2, "group_size": 2, "eta": 1, "window": 2, "max_lag": 2, "limits": LIMITS, **changes}
    terms = {term.name: values.pop(term.name) for term in fields(LagRule) if term.name in values}
    lag = LagRule(**terms)  # type: ignore[arg-type]
    return LedgerSettings(lag=lag, **values)  # type: ignore[arg-type]


def run_started(
    run_id: str = "run", *, start: int = 1, learner_epoch: int = 1, version: int = 0
) -> RunStarted:
    """The log's record of a start of the learner."""
    return RunStarted(run_id, start, learner_epoch, version, "{}", {})


def prompts() -> PromptStream:
    return PromptStream(NUM_RECORDS, seed=7, record=lambda index: b'{"prompt": %d}' % index)


def ledger_arguments(**changes: object) -> dict[str, object]:
    values = dict(
        run_id="run", learner_epoch=1, run_seed=5, prompts=prompts(), sampling=Sampling(),
        eval_sources={"": EvalSource(lambda index: b'{"test": %d}' % index, Sampling(temperature=0.0))},
    )
    return {**values, **changes}


def make_ledger(kind: type[Ledger] = Ledger, *, keep_group=None, **changes: object) -> Ledger:
    arguments = ledger_arguments() if keep_group is None else ledger_arguments(keep_group=keep_group)
    ledger = kind(settings(**changes), **arguments)  # type: ignore[arg-type]
    publish(ledger, VersionRef(1, 0))
    return ledger


def member(
    index: int, versions: Sequence[tuple[int, int]], *, reward: float = 1.0,
    status: MemberStatus = MemberStatus.FINISHED, scores: dict[str, float] | None = None,
) -> Member:
    """One action token of each version, then one observation token."""
    num = len(versions)
    return Member(
        index=index, status=status, prompt_ids=pack_ids([1, 2, 3]), token_ids=pack_ids([4] * num + [5]),
        logprobs=pack_logprobs([-0.5] * num + [0.0]), mask=((0, num),),
        versions=tuple(Span(epoch, version, i, i + 1) for i, (epoch, version) in enumerate(versions)),
        turns=(Turn(0, num + 1, reward),), reward=reward, scores=scores or {}, finish="stop",
    )


@dataclass
class FakeActor:
    """An actor without a model: it keeps leases and outbox as a real one must, and samples what it is told to."""

    ledger: Ledger
    actor_id: str
    incarnation: int = 11
    slots: int = 4
    ref: VersionRef | None = VersionRef(1, 0)
    run_id: str | None = None
    next_seq: int = 1
    leases: dict[LeaseRef, Lease] = field(default_factory=dict)
    outbox: dict[int, Group] = field(default_factory=dict)
    tokens: int = 0

    def join(self, now: float = 0.0, **changes: object):
        result = self.ledger.hello(self.actor_id, self.hello(**changes), now)
        if result.stop is None:
            self.run_id = self.ledger.run_id
            kept = {ref for ref, keep in result.held if keep}
            self.leases = {ref: lease for ref, lease in self.leases.items() if ref in kept}
            self.forget(result.durable_upto, result.durable)
        return result

    def hello(self, **changes: object) -> Hello:
        values = dict(
            protocol_min=1, protocol_max=1, actor_id=self.actor_id, incarnation=self.incarnation, run_id=self.run_id,
            engine="fake", software="test", max_leases=self.slots, transports=("zmq",),
            installed=(self.ref, bytes(16)) if self.ref is not None else None, held=tuple(self.leases),
            outbox=tuple((seq, seq) for seq in sorted(self.outbox)), next_seq=self.next_seq,
        )
        return Hello(**{**values, **changes})  # type: ignore[arg-type]

    def beat(
        self, now: float = 0.0, *, stuck: Sequence[LeaseRef] = (), free_eval: int = 0,
        held: Sequence[LeaseRef] | None = None, works: bool = True, **claims: int,
    ) -> bool:
        """A heartbeat a moment after a token was generated, or with the count of the one before."""
        self.tokens += works
        num_train = sum(lease.purpose == 0 for lease in self.leases.values())
        return self.ledger.beat(self.actor_id, ActorHeartbeat(
            incarnation=self.incarnation, beat=1, state=ActorState.RUNNING, running=num_train, installed=self.ref,
            tokens_total=self.tokens, stuck=tuple(stuck), outbox_groups=len(self.outbox), outbox_bytes=0,
            free_eval=free_eval, held=None if held is None else tuple(held),
            **{"free": max(0, self.slots - num_train), **claims},
        ), now)

    def ask(self, now: float = 0.0, *, free_eval: int = 0) -> list[Lease]:
        """Say what is free and take what is granted; several times, because one grant is only a fair share."""
        self.beat(now, free_eval=free_eval)
        taken = []
        while leases := self.ledger.grant(self.actor_id, now):
            taken.extend(leases)
            self.leases.update((lease.ref, lease) for lease in leases)
        return taken

    def install(self, version: int, now: float = 0.0, *, epoch: int = 1) -> None:
        self.ref = VersionRef(epoch, version)
        self.ledger.installed(self.actor_id, self.ref, True, now)

    def finish(self, lease: Lease, now: float = 0.0, **changes: object) -> AcceptResult:
        """Send a whole group of this lease."""
        return self.send(self.group(lease, **changes), now)

    def group(
        self, lease: Lease, *, versions: Sequence[tuple[int, int]] | None = None, members: Sequence[int] | None = None,
        aborted: Sequence[int] = (), rewards: Sequence[float] = (), outcome: int = Outcome.COMPLETE, reason: int = 0,
        answers: tuple[str, ...] = (),
    ) -> Group:
        """The next GROUP, put into the outbox; by default everything leased, sampled from the installed version."""
        spans = versions or [(self.ref.learner_epoch, self.ref.version)]
        chosen = lease.members if members is None else members
        message = Group(
            incarnation=self.incarnation, seq=self.next_seq, group_id=lease.group_id, attempt=lease.attempt,
            outcome=Outcome(outcome), reason=ReturnReason(reason), detail="", sampling=lease.sampling,
            members=tuple(
                member(
                    i, spans, reward=rewards[at] if rewards else float(i),
                    status=MemberStatus.ABORTED if i in aborted else MemberStatus.FINISHED,
                )
                for at, i in enumerate(chosen)
            ),
            stats={}, answers=answers,
        )
        self.next_seq += 1
        self.outbox[message.seq] = message
        if outcome != Outcome.PARTIAL:
            self.leases.pop(lease.ref, None)
        return message

    def send(self, group: Group, now: float = 0.0) -> AcceptResult:
        return self.ledger.accept(self.actor_id, group, encode(group), now)

    def hand_back(self, lease: Lease, reason: int, now: float = 0.0) -> AcceptResult:
        return self.finish(lease, now, members=(), outcome=Outcome.RETURNED, reason=reason)

    def take_acks(self) -> list[Ack]:
        """Every ACK that is due; the outbox loses what may be forgotten."""
        acks = []
        while (ack := self.ledger.take_acks(self.actor_id)) is not None:
            acks.append(ack)
            self.forget(ack.durable_upto, ack.durable)
            for one in ack.rejected:
                self.outbox.pop(one.seq, None)
        return acks

    def forget(self, upto: int, ranges: Sequence[SeqRange]) -> None:
        for seq in list(self.outbox):
            if seq <= upto or any(first <= seq <= last for first, last in ranges):
                del self.outbox[seq]

    def revoke(self, refs: Sequence[LeaseRef]) -> None:
        for ref in refs:
            self.leases.pop(ref, None)


def joined(ledger: Ledger, actor_id: str = "a1", *, now: float = 0.0, **changes: object) -> FakeActor:
    """An actor that the ledger has welcomed."""
    actor = FakeActor(ledger, actor_id, **changes)  # type: ignore[arg-type]
    actor.join(now)
    return actor


def one_actor(*, slots: int = 4, **changes: object) -> tuple[Ledger, FakeActor, list[Lease]]:
    """A ledger with these settings, its only actor, and all leases that this one gets."""
    ledger = make_ledger(**changes)
    actor = joined(ledger, slots=slots)
    return ledger, actor, actor.ask()


def hello_of(actor_id: str, incarnation: int = 1, **changes: object) -> Hello:
    """The HELLO of an actor, whatever ledger it meets."""
    return FakeActor(None, actor_id, incarnation).hello(**changes)  # type: ignore[arg-type]


def held_groups(ledger: Ledger) -> list[HeldGroup]:
    """Complete groups that wait for a batch, in dispatch order, as they would be trained now."""
    return [ledger.lag.held(record) for record in ledger.groups.in_state(GroupState.HELD)]


def cut(ledger: Ledger, version: int | None = None) -> list[HeldGroup] | None:
    """Cut a batch for the ledger's version, or another."""
    return ledger.cut_batch(ledger.version if version is None else version)


def end_batch(ledger: Ledger, version: int, *, skipped: bool = False, reason: str = "") -> None:
    """End the oldest batch."""
    ledger.end_batch(StepTaken(version, skipped, reason))


def publish(ledger: Ledger, ref: VersionRef) -> None:
    """Publish a version."""
    ledger.publish(Manifest(ref, None, bytes(16), 0, (), bytes(16)))


def train(ledger: Ledger, *, skipped: bool = False) -> list[int]:
    """Cut a batch and train on it at once; the group ids."""
    batch = cut(ledger)
    assert batch is not None, ledger.wait_reason(0.0)
    end_batch(ledger, ledger.version + (0 if skipped else ledger.lag.rule.steps_per_batch), skipped=skipped)
    if not skipped:
        publish(ledger, ledger.versions.ref)
    return [group.group_id for group in batch]


_LOGS: WeakKeyDictionary[Ledger, list[tuple[int, Record]]] = WeakKeyDictionary()


def log_of(ledger: Ledger) -> list[tuple[int, Record]]:
    """All that this ledger and those before it have logged, with its numbers: what would be in the files."""
    kept = _LOGS.setdefault(ledger, [])
    first = ledger.journal.first_waiting
    kept.extend(enumerate(ledger.journal.take(), first))
    return kept


def sync(ledger: Ledger) -> None:
    """The log is on the disk up to here."""
    ledger.logged(log_of(ledger)[-1][0] if log_of(ledger) else 0)


def restart(
    ledger: Ledger, state: bytes | None, *, upto: int | None = None, equal: bool = False, publishes: bool = True,
    changed: LedgerSettings | None = None,
) -> Ledger:
    """The learner died; its successor starts from this checkpoint, and from as much of the log as the disk has.

    Args:
        upto: the last record that it has; None is the end of what the checkpoint knows.
        equal: what was trained again gave the same weights: the epoch goes on.
        changed: the settings that it starts with, in place of the same.
    """
    if upto is None:
        upto = 0 if state is None else read_snapshot(state).next_sequence - 1
    log = [(sequence, record) for sequence, record in log_of(ledger) if sequence <= upto]
    before = ledger.versions
    epoch = before.learner_epoch + (not equal)
    reached = _reached(ledger, state, log)
    own = Lineage(before.learner_epoch, before.lineage[-1].first, reached)
    lineage = (*cut_lineage(before.lineage[:-1], reached), own)
    arguments = ledger_arguments(learner_epoch=epoch, lineage=lineage, keep_group=ledger.lifecycle.keep_group)
    successor = type(ledger).restore(  # type: ignore[arg-type]
        state, changed or ledger.settings, records=lambda first: [one for one in log if one[0] >= first],
        **arguments,
    )
    _LOGS[successor] = log
    commit(successor, run_started(start=2, learner_epoch=epoch, version=successor.version))
    if publishes:
        publish(successor, successor.versions.ref)
    return successor


def _reached(ledger: Ledger, state: bytes | None, log: list[tuple[int, Record]]) -> int:
    """The version that training the batches of the log again leads to, also those whose end it does not have."""
    snapshot = None if state is None else read_snapshot(state)
    version, first = (0, 1) if snapshot is None else (snapshot.version, snapshot.next_sequence)
    num_open = 0
    for sequence, record in log:
        if sequence >= first and isinstance(record, BatchCut):
            num_open += 1
        elif sequence >= first and isinstance(record, StepTaken):
            num_open, version = num_open - 1, record.version
    return version + num_open * ledger.lag.rule.steps_per_batch
