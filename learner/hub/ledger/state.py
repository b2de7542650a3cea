"""The ledger's tables, and the transitions that its verbs share. The verbs are in the modules named by `ledger`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from learner.hub.ledger.dedup import DedupTable
from learner.hub.ledger.evals import EvalTable
from learner.hub.ledger.filters import GroupFilter, keep_all
from learner.hub.ledger.groups import (
    Delivery,
    Grant,
    GroupRecord,
    GroupState,
    GroupTable,
    HeldGroup,
    LagRule,
    OpenLease,
)
from learner.hub.ledger.prompts import PromptStream
from learner.hub.ledger.settings import LedgerSettings
from learner.hub.ledger.versions import Versions
from streamrl.messages import EVAL_BIT, LeaseRef, Lineage, Sampling, VersionRef
from streamrl.messages.validate import MemberSummary


@dataclass(slots=True)
class Actor:
    """A linked actor, as far as leases go. `state` is JOINING (nothing useful installed), READY or LEAVING."""

    actor_id: str
    incarnation: int
    slots: int
    heard_at: float
    survived_restart: bool
    """It was in this run before this start of the learner, so it may hold leases that no table knows."""
    state: str = "JOINING"
    installed: VersionRef | None = None
    free: int = 0
    free_eval: int = 0
    slots_eval: int = 0
    leases: set[int] = field(default_factory=set)  # group ids, training
    eval_leases: set[int] = field(default_factory=set)
    revocations: list[LeaseRef] = field(default_factory=list)
    resend_upto: int = 0  # orphaned leases wait until its numbers up to here have verdicts
    granted_no: int = 0  # when it last got a lease, for round robin


@dataclass(slots=True)
class SettledSinceCheckpoint:
    """What came to an end since some point: deliveries that may become durable, groups that may be forgotten."""

    deliveries: list[Delivery] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class CutBatch:
    """Groups that a rank trains now, or will train next."""

    version: int
    group_ids: list[int]


class Books:
    """State of the ledger. Methods without a leading underscore are for reading."""

    def __init__(
        self,
        settings: LedgerSettings,
        *,
        run_id: str,
        learner_epoch: int,
        run_seed: int,
        prompts: PromptStream,
        sampling: Sampling,
        eval_sampling: Sampling,
        keep_group: GroupFilter = keep_all,
        eval_record: Callable[[int], bytes | None] | None = None,
        version: int = 0,
        lineage: Sequence[Lineage] = (),
    ) -> None:
        self.settings = settings
        self.run_id = run_id
        self.run_seed = run_seed
        self.prompts = prompts
        self.sampling = sampling
        self.eval_sampling = eval_sampling
        self.versions = Versions(learner_epoch, version, lineage, version // settings.versions_per_batch)
        self.groups = GroupTable()
        self.groups.num_trained = self.versions.num_batches * settings.groups_per_batch
        self.groups.next_id = self.groups.done_below = prompts.cursor = self.groups.num_trained
        self.senders = DedupTable(settings.dedupe_window)
        self.evals = EvalTable(settings.max_attempts)
        self.actors: dict[str, Actor] = {}
        self.eta, self.max_lag = settings.eta, settings.max_lag  # as they are now; see `set_bounds`
        self._lag_rule = LagRule(settings.mode == "mask_old_tokens")
        self._wider_until: list[tuple[int, int]] = []  # (bound that was lowered, version up to which it may still bind)
        self._keep_group = keep_group
        self._eval_record = eval_record
        self._counts: Counter[str] = Counter()
        self._batches: deque[CutBatch] = deque()
        self._ends = SettledSinceCheckpoint()
        self._frozen: dict[int, SettledSinceCheckpoint] = {}
        self._restored = learner_epoch > 1
        self._grace_until: float | None = None  # until then, leases of a dead epoch wait for their actors
        self._grant_no = 0
        self._live_allowed = 0  # more than capacity only after eta was lowered

    @property
    def version(self) -> int:
        return self.versions.current

    @property
    def capacity(self) -> int:
        """L1: groups that may be drawn and not dropped, trained ones included."""
        by_lead = (self.eta + 1) * self.settings.groups_per_batch + self.groups.num_trained
        total = self.settings.num_groups_total
        return by_lead if total is None else min(by_lead, total)

    def set_bounds(self, eta: int, max_lag: int) -> None:
        """Move the lead and the bound of a running hub.

        Raising acts at once. Lowering drains: what was leased under a wider bound keeps it and is trained, and nothing
        new is drawn until the lead has shrunk. So every group is trained within the larger of the bound at its grant
        and the bound now, and lowering throws nothing away.

        Raises:
            ValueError: the pair contradicts itself; nothing is changed.
        """
        self.settings.check_bounds(eta, max_lag)
        if max_lag < self.max_lag:
            self._wider_until.append((self.max_lag, self.version + self.max_lag))
        self._wider_until = [one for one in self._wider_until if one[1] >= self.version]
        self.eta, self.max_lag = eta, max_lag
        self._live_allowed = max(self._live_allowed, self.groups.num_live())

    def bound_of(self, record: GroupRecord) -> int:
        """The largest lag at which this group may be trained now."""
        return max(record.max_lag, self.max_lag)

    def widest_bound(self) -> int:
        """The largest bound that an open lease may go by."""
        return max([self.max_lag, *(bound for bound, until in self._wider_until if until >= self.version)])

    def check(self) -> None:
        """Assert what must hold between any two verbs; cheap enough for every tick."""
        self.groups.check()
        live = self.groups.num_live()
        assert live <= max(self.capacity, self._live_allowed), f"{live} live groups, capacity is {self.capacity}"
        drawn = self.groups.next_id
        assert self.prompts.cursor == drawn, f"{drawn} groups drawn, but the prompt cursor is {self.prompts.cursor}"
        for actor in self.actors.values():
            for group_id in actor.leases:
                record = self.groups.live.get(group_id)
                assert record is not None and record.lease is not None, f"{actor.actor_id} holds ended group {group_id}"
                assert record.lease.actor_id == actor.actor_id, f"group {group_id} is with {record.lease.actor_id}"
        held, leased = sum(len(actor.leases) for actor in self.actors.values()), self.groups.num(GroupState.LEASED)
        assert held == leased, f"actors hold {held} leases, the table has {leased}"

    # --- groups ---------------------------------------------------------------------------------------------------

    def _draw(self) -> GroupRecord:
        """The next prompt of the stream as a READY group. Asks nobody; callers check capacity."""
        prompt = self.prompts.draw()
        record = GroupRecord(self.groups.next_id, prompt.prompt_index, prompt.pass_index)
        self.groups.add(record)
        assert self.groups.num_live() <= self.capacity, f"drew group {record.group_id} beyond {self.capacity}"
        return record

    def _draw_upto(self, group_id: int) -> bool:
        """Draw all groups up to this number, if capacity allows: a group's prompt follows from its number."""
        if self.groups.num_live() + group_id - self.groups.next_id + 1 > self.capacity:
            return False
        while self.groups.next_id <= group_id:
            self._draw()
        return True

    def _missing(self, record: GroupRecord) -> tuple[int, ...]:
        return tuple(i for i in range(self.settings.group_size) if i not in record.members)

    def _detach(self, record: GroupRecord, *, revoke: bool) -> None:
        """Take the lease off its actor, without saying yet what becomes of the group."""
        lease = record.lease
        assert lease is not None, f"group {record.group_id} has no lease to end"
        record.lease = None
        actor = self.actors.get(lease.actor_id)
        if actor is not None:
            actor.leases.discard(record.group_id)
            if revoke:
                actor.revocations.append((record.group_id, lease.attempt))  # its slot is free once it has read this
            else:
                actor.free += 1  # its slot is free now; the next heartbeat says so too, up to a second later

    def _retry(self, record: GroupRecord, now: float, *, failed: bool) -> None:
        """An attempt ended and members are missing: by policy the group waits again, is held as it is, or dropped."""
        settings = self.settings
        record.num_failures += failed
        spent = record.num_failures >= settings.max_attempts
        enough = settings.group_policy == "accept_partial" and len(record.members) >= settings.min_members
        first = record.first_granted_at
        due = settings.group_deadline_s == 0 or (first is not None and now - first >= settings.group_deadline_s)
        if enough and (spent or due):
            self._counts["num_groups_partial"] += 1
            self._hold(record)
        elif spent:
            self._drop(record, "attempts")
        else:
            if settings.group_policy == "reissue_whole" and record.members:
                self._discard(record)
            if record.state is not GroupState.READY:
                self.groups.move(record, GroupState.READY)

    def _hold(self, record: GroupRecord) -> None:
        """The group is complete: it waits for a batch, unless the filter drops it."""
        record.holder = ""
        self.groups.move(record, GroupState.HELD)
        reason = self._keep_group(self._as_held(record, self.version))
        if reason is not None:
            self._counts["num_groups_filtered"] += 1
            self._drop(record, reason)

    def _discard(self, record: GroupRecord) -> None:
        """Throw away what was accepted for this group. Its senders may forget it now: after a restart from an older
        checkpoint it would only be generated again, and keeping it until the next checkpoint would let a strict filter
        fill every outbox, which stops the generation that the next checkpoint waits for."""
        self._counts["num_tokens_discarded"] += sum(facts.num_action_tokens for facts in record.members.values())
        for delivery in record.deliveries:
            sender = self.senders.get(delivery.actor_id, delivery.incarnation)
            if sender is not None:
                sender.make_durable(delivery.seq)
        record.members, record.frames, record.deliveries = {}, [], []

    def _drop(self, record: GroupRecord, reason: str) -> None:
        self._counts["num_groups_dropped"] += 1
        self._counts[f"num_dropped_{reason}"] += 1
        self._discard(record)
        self._end(record, GroupState.DROPPED, reason)

    def _end(self, record: GroupRecord, state: GroupState, reason: str = "") -> None:
        self._ends.deliveries.extend(record.deliveries)
        self._ends.group_ids.append(record.group_id)
        self.groups.settle(record, state, reason)

    def _stale(self, record: GroupRecord) -> None:
        """Too old to train, by L2: generate it again or drop it. Nothing of it survives, and it has no lease."""
        self._counts["num_groups_stale"] += 1
        self._counts["num_tokens_stale"] += sum(facts.num_action_tokens for facts in record.members.values())
        record.num_failures += 1
        if self.settings.on_stale == "drop" or record.num_failures >= self.settings.max_attempts:
            self._drop(record, "stale")
            return
        self._discard(record)
        if record.state is not GroupState.READY:
            self.groups.move(record, GroupState.READY)

    def _bind_lease(
        self, actor: Actor, record: GroupRecord, attempt: int, members: tuple[int, ...], now: float
    ) -> None:
        """A READY group becomes this actor's."""
        record.lease = OpenLease(attempt, actor.actor_id, members, now, now)
        record.grants[attempt] = Grant(actor.actor_id, members)
        record.next_attempt = max(record.next_attempt, attempt + 1)
        record.first_granted_at = now if record.first_granted_at is None else record.first_granted_at
        record.holder = ""
        record.max_lag = max(record.max_lag, self.max_lag)
        actor.leases.add(record.group_id)
        self.groups.move(record, GroupState.LEASED)

    # --- leases of one actor --------------------------------------------------------------------------------------

    def _open_leases(self, actor: Actor) -> list[tuple[int, OpenLease]]:
        """(group_id, lease) of everything this actor holds, in dispatch order, evaluation last."""
        train = [(group_id, self.groups.live[group_id].lease) for group_id in sorted(actor.leases)]
        evals = [(group_id, self.evals.item(group_id).lease) for group_id in sorted(actor.eval_leases)]
        return train + evals

    def _release(self, group_id: int, now: float, *, failed: bool, revoke: bool = False) -> None:
        """End an open lease without data; its group goes back to the pool or runs out of attempts."""
        if group_id & EVAL_BIT:
            lease = self.evals.item(group_id).lease
            actor = self.actors[lease.actor_id]
            actor.eval_leases.discard(group_id)
            if revoke:
                actor.revocations.append((group_id, lease.attempt))
            else:
                actor.free_eval += 1
            self.evals.release(group_id, failed=failed)
        else:
            record = self.groups.live[group_id]
            self._detach(record, revoke=revoke)
            self._retry(record, now, failed=failed)

    def held_groups(self) -> list[HeldGroup]:
        """Complete groups that wait for a batch, in dispatch order, as of the present version."""
        return [
            self._as_held(self.groups.live[group_id], self.version) for group_id in self.groups.ids(GroupState.HELD)
        ]

    def _as_held(self, record: GroupRecord, version: int) -> HeldGroup:
        return self._lag_rule.held(record, version, self.bound_of(record))

    def _is_stale(self, record: GroupRecord, facts: MemberSummary, version: int) -> bool:
        return self._lag_rule.is_stale(facts, version, self.bound_of(record))
