"""Actor membership and lease reclamation: who is linked, what each holds, and what a HELLO keeps."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from learner.hub.ledger.apply import commit
from learner.hub.ledger.lifecycle import GroupLifecycle
from learner.hub.ledger.tables.actor import Actor, LeaseShares
from learner.hub.ledger.tables.dedup import DedupEntry
from learner.hub.ledger.tables.evals import EvalTable
from learner.hub.ledger.tables.groups import GroupRecord, GroupState, GroupTable, OpenLease
from streamrl.messages import EVAL_BIT, ActorHeartbeat, LeaseRef
from streamrl.stream.records import GroupMoved

RETURN_WITHIN = 6  # times `dead_after_s`: leases of the run before wait no longer for their actors
PROBATION_S = 30.0  # for the first group of an actor, while others wait; or so many times as long as any group took:
PROBATION = 3
MAX_NAMES = 4096  # that have delivered, and are remembered
LOST_AFTER = 3  # times `dead_after_s` since its grant: a lease that no heartbeat has named by then never arrived


@dataclass(frozen=True, slots=True)
class Effect:
    """An order to the shell. evict: STOP(EVICTED) and close the link; revoke: name these leases in a LEASE."""

    kind: Literal["evict", "revoke"]
    actor_id: str
    leases: tuple[LeaseRef, ...]


class ActorTable:
    """The linked actors, and the two-sided link between a lease and its actor."""

    def __init__(self, lifecycle: GroupLifecycle, evals: EvalTable, *, restored: bool) -> None:
        self.restored = restored  # this ledger came from a checkpoint
        self._settings, self._counts = lifecycle.settings, lifecycle.counts
        self._grace_from: float | None = None
        self._grace_until = -math.inf
        self._lifecycle = lifecycle
        self._evals = evals
        self._actors: dict[str, Actor] = {}
        self._proven: OrderedDict[str, None] = OrderedDict()
        self._slowest_s = 0.0  # longest time from a lease to its group
        self.shares = LeaseShares()

    def __len__(self) -> int:
        return len(self._actors)

    def get(self, actor_id: str) -> Actor | None:
        return self._actors.get(actor_id)

    def all(self) -> list[Actor]:
        return list(self._actors.values())

    def add(self, actor: Actor) -> None:
        actor.proven = actor.survived_restart or actor.actor_id in self._proven
        if not actor.proven and any(other.proven for other in self._actors.values()):
            actor.train.trust = 1
        self._actors[actor.actor_id] = actor
        self.shares.touch(actor)

    def remove(self, actor: Actor, now: float, *, failed: bool) -> list[LeaseRef]:
        """Remove an actor without a link: its leases go back to the pool, each group at its old place."""
        held = actor.open_leases()
        for group_id, _ in held:
            self.release(group_id, now, failed=failed)
        del self._actors[actor.actor_id]
        self.shares.remove(actor.actor_id)
        return [(group_id, lease.attempt) for group_id, lease in held]

    def start_grace(self, now: float, *, survived_restart: bool) -> None:
        """Wait for actors of the run before, longer with each that comes back: thousands need longer than one."""
        if self.restored and (survived_restart or self._grace_from is None):
            self._grace_from = now if self._grace_from is None else self._grace_from
            dead_after_s = self._settings.dead_after_s
            self._grace_until = min(now + dead_after_s, self._grace_from + RETURN_WITHIN * dead_after_s)

    def in_grace(self, now: float) -> bool:
        """Return whether leases of the run before still wait for their actors."""
        return now < self._grace_until

    def lease(self, actor: Actor, record: GroupRecord, attempt: int, members: tuple[int, ...], now: float) -> None:
        """Give a READY group to this actor."""
        commit(self._lifecycle.state, GroupMoved(
            record.group_id, GroupState.LEASED, actor_id=actor.actor_id, attempt=attempt, members=members,
            # A bound that is lowered later does not apply to it.
            max_lag=max(record.max_lag, self._lifecycle.lag.rule.max_lag),
        ))
        record.first_granted_at = now if record.first_granted_at is None else record.first_granted_at
        record.lease = actor.train.leases[record.group_id] = OpenLease(attempt, actor.actor_id, members, now, now)
        self.shares.touch(actor)

    def detach(self, record: GroupRecord, *, revoke: bool) -> None:
        """Take the lease off its actor, without saying yet what becomes of the group."""
        lease, record.lease = record.lease, None
        assert lease is not None, f"group {record.group_id} has no lease to end"
        actor = self._actors.get(lease.actor_id)
        if actor is not None:
            actor.end_lease(record.group_id, revoke=revoke)
            self.shares.touch(actor)

    def release(self, group_id: int, now: float, *, failed: bool, revoke: bool = False) -> None:
        """End an open lease without data; its group goes back to the pool or runs out of attempts."""
        if group_id & EVAL_BIT:
            record = self._evals.record(group_id)
            self.detach(record, revoke=revoke)
            self._evals.release(record, failed=failed)
        else:
            record = self._lifecycle.groups.live[group_id]
            self.detach(record, revoke=revoke)
            self._lifecycle.retry(record, now, failed=failed)

    def delivered(self, actor: Actor, group_id: int, lease: OpenLease | None, now: float) -> None:
        """Note that an actor has delivered a group; `lease` is the one it had for it, None if that had ended before."""
        actor.credit(group_id).delivered()
        self.shares.touch(actor)
        if group_id & EVAL_BIT:
            return
        actor.proven = True
        self._proven[actor.actor_id] = None
        if len(self._proven) > MAX_NAMES:
            self._proven.popitem(last=False)
        if lease is not None:
            self._slowest_s = max(self._slowest_s, now - lease.granted_at)

    def spread(self, now: float) -> None:
        """While some wait and there is nothing for them: what actors that have not delivered yet hold too much or long.

        They are left with a share, and one more if every other has something. Once others have delivered, none may keep
        those waiting for its first group; what it still delivers counts as any late delivery, and it gets leases again.
        """
        newcomers = [actor for actor in self._actors.values() if not actor.proven and actor.train.leases]
        waiting = [actor for actor in self._actors.values() if actor.wants_train] if newcomers else []
        if not waiting:
            return
        takers = sum(actor.state == "READY" and actor.train.limit > 0 for actor in self._actors.values())
        most = -(-self._lifecycle.groups.num(GroupState.LEASED) // takers) + all(one.num_train for one in waiting)
        limit_s = max(PROBATION_S, PROBATION * self._slowest_s) if any(one.proven for one in waiting) else math.inf
        for actor in newcomers:
            if waiting == [actor]:
                continue
            for place, (group_id, lease) in enumerate(sorted(actor.train.leases.items())):
                if now - lease.granted_at >= limit_s:
                    self._counts["num_leases_expired"] += 1
                    actor.train.trust = 0
                    self.release(group_id, now, failed=False)
                elif place >= most:
                    self.release(group_id, now, failed=False, revoke=True)

    def release_orphans(self, actor: Actor, entry: DedupEntry, now: float) -> None:
        """Release leases that are still orphaned once the actor's re-sends are in: they were lost."""
        if entry.settled.upto >= actor.resend_upto:
            for group_id, lease in actor.open_leases():
                if lease.orphan:
                    self.release(group_id, now, failed=False)

    def renew(self, actor: Actor, beat: ActorHeartbeat, now: float) -> None:
        """A lease goes on while its actor works on it and shows progress, with any of its leases; one that its
        heartbeats never named was lost on the way."""
        stuck, held = set(beat.stuck), None if beat.held is None else set(beat.held)
        # Some engines count a turn's tokens at its end: until then nothing moves, for as long as the slowest may take.
        moved_at = actor.moved_at + max(0.0, self._settings.slowest_turn_s - self._settings.lease_ttl_s)
        for group_id, lease in actor.open_leases():
            ref = (group_id, lease.attempt)
            if lease.orphan:
                continue  # it ends with the actor's re-sends, whatever a heartbeat lists
            # Old actors do not list what they hold: then every lease counts as held.
            at_work = held is None or ref in held
            lease.seen = lease.seen or at_work
            if at_work and ref not in stuck:
                lease.renewed_at = max(lease.renewed_at, min(now, moved_at))
            elif not lease.seen and now - lease.granted_at >= LOST_AFTER * self._settings.dead_after_s:
                self._counts["num_leases_lost"] += 1
                self.release(group_id, now, failed=False, revoke=True)

    def expire_leases(self, now: float) -> None:
        """End leases without progress, and those that are older than any honest work on one."""
        lease_max_s = self._settings.lease_max_s or math.inf
        for actor in self._actors.values():
            for group_id, lease in actor.open_leases():
                if now - lease.renewed_at >= self._settings.lease_ttl_s or now - lease.granted_at >= lease_max_s:
                    self._counts["num_leases_expired"] += 1
                    actor.credit(group_id).trust = 1
                    self.release(group_id, now, failed=True, revoke=True)

    def take_revocations(self) -> list[Effect]:
        """Take the leases that their actors must stop."""
        effects = [Effect("revoke", one.actor_id, tuple(one.revocations)) for one in self.all() if one.revocations]
        for actor in self._actors.values():
            actor.revocations.clear()
        return effects

    def check(self, groups: GroupTable) -> None:
        """Assert that actors and groups agree on who has which lease."""
        for actor in self._actors.values():
            for group_id in actor.train.leases:
                record = groups.live.get(group_id)
                assert record is not None and record.lease is not None, f"{actor.actor_id} holds ended group {group_id}"
                assert record.lease.actor_id == actor.actor_id, f"group {group_id} is with {record.lease.actor_id}"
        held = sum(len(actor.train.leases) for actor in self._actors.values())
        leased = groups.num(GroupState.LEASED)
        assert held == leased, f"actors hold {held} leases, the table has {leased}"
        self.shares.check(self._actors.values())
