"""Verbs about actors: who is here, what they hold, and what returns to the pool when they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from learner.hub.ledger.dedup import outbox_error
from learner.hub.ledger.groups import GroupState
from learner.hub.ledger.state import Actor, Books
from streamrl.messages import (
    EVAL_BIT,
    PROTOCOL,
    Ack,
    ActorHeartbeat,
    Hello,
    LeaseRef,
    SeqRange,
    Stop,
    StopReason,
    VersionRef,
)

LOST_AFTER = 3
"""A lease that no beat has named for so many times `dead_after_s` since it was granted never arrived."""


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The answer to a HELLO: `stop`, or everything that WELCOME says about delivery and leases.

    `fenced` is the incarnation that this HELLO superseded: its link, if there is one, gets STOP(FENCED).
    """

    stop: Stop | None = None
    settled_upto: int = 0
    settled: tuple[SeqRange, ...] = ()
    durable_upto: int = 0
    durable: tuple[SeqRange, ...] = ()
    held: tuple[tuple[LeaseRef, bool], ...] = ()
    fenced: int | None = None


@dataclass(frozen=True, slots=True)
class Effect:
    """Something the shell must do. evict: STOP(EVICTED) and close the link; revoke: name these leases in a LEASE."""

    kind: Literal["evict", "revoke"]
    actor_id: str
    leases: tuple[LeaseRef, ...]


class Roster(Books):
    """HELLO to BYE."""

    def hello(self, actor_id: str, hello: Hello, now: float) -> JoinResult:
        """Bind an actor to its link, or say why not. The newest incarnation wins; a superseded one never returns."""
        stop = self._refuse(actor_id, hello)
        if stop is not None:
            return JoinResult(stop=stop)
        if self._restored and self._grace_until is None:
            self._grace_until = now + self.settings.dead_after_s
        actor, fenced = self._bind(actor_id, hello, now)
        sender = self.senders.get(actor_id, hello.incarnation)
        sender.forget_all_but(hello.outbox, hello.next_seq)
        held = tuple((ref, self._keep(actor, ref, now)) for ref in hello.held)
        self._orphan_the_rest(actor, hello, {ref for ref, kept in held if kept}, now)
        return JoinResult(
            settled_upto=sender.settled.upto, settled=sender.settled.ranges(),
            durable_upto=sender.durable.upto, durable=sender.durable.ranges(),
            held=held, fenced=fenced,
        )

    def heard(self, actor_id: str, now: float) -> bool:
        """Any message is a sign of life. False: this actor has no link here, answer STOP(NO_LINK)."""
        actor = self.actors.get(actor_id)
        if actor is None:
            return False
        actor.heard_at = now
        return True

    def beat(self, actor_id: str, beat: ActorHeartbeat, now: float) -> bool:
        """Renew its leases, except those it calls stuck or does not hold, and note what it has free. False: no link, or
        a fenced one."""
        actor = self.actors.get(actor_id)
        if actor is None or actor.incarnation != beat.incarnation or not self.heard(actor_id, now):
            return False
        actor.free, actor.free_eval = beat.free, beat.free_eval
        actor.slots_eval = max(actor.slots_eval, beat.free_eval)
        actor.slots = beat.slots or actor.slots
        self._set_installed(actor, beat.installed)
        self._renew(actor, beat, now)
        return True

    def _renew(self, actor: Actor, beat: ActorHeartbeat, now: float) -> None:
        """A lease goes on while its actor works on it; one that its beats never named was lost on the way."""
        stuck, held = set(beat.stuck), None if beat.held is None else set(beat.held)
        for group_id, lease in self._open_leases(actor):
            ref = (group_id, lease.attempt)
            if lease.orphan:
                continue
            at_work = held is None or ref in held
            lease.seen = lease.seen or at_work
            if at_work and ref not in stuck:
                lease.renewed_at = now
            elif not lease.seen and now - lease.granted_at >= LOST_AFTER * self.settings.dead_after_s:
                self._counts["num_leases_lost"] += 1
                self._release(group_id, now, failed=False, revoke=True)

    def installed(self, actor_id: str, ref: VersionRef, ok: bool, now: float) -> None:
        """A version is live at this actor, or it refused it. The shell has checked that the root was published."""
        if not self.heard(actor_id, now):
            return
        self._counts["num_installs" if ok else "num_install_failures"] += 1
        if ok:
            self._set_installed(self.actors[actor_id], ref)

    def suspend(self, actor_id: str, now: float) -> None:
        """Its weights are not to be trusted: its leases go to others, and it gets none until `installed` says so."""
        if not self.heard(actor_id, now):
            return
        actor = self.actors[actor_id]
        self._set_installed(actor, None)
        for group_id, _ in self._open_leases(actor):
            self._release(group_id, now, failed=False, revoke=True)

    def evict(self, actor_id: str, now: float) -> list[LeaseRef]:
        """Cut an actor off; its leases go back to the pool, each group at its old place."""
        actor = self.actors.get(actor_id)
        if actor is None:
            return []
        self._counts["num_evictions"] += 1
        return self._part(actor, now, failed=True)

    def drain(self, actor_id: str, now: float) -> None:
        """It is leaving: no new leases, but it may finish those it has."""
        if self.heard(actor_id, now):
            self.actors[actor_id].state = "LEAVING"

    def bye(self, actor_id: str, now: float) -> None:
        """It has left. Whatever it still held goes back to the pool and counts as no failure of the group."""
        actor = self.actors.get(actor_id)
        if actor is not None:
            self._part(actor, now, failed=False)

    def take_acks(self, actor_id: str) -> Ack | None:
        """The next ACK for this actor, or None. Ask again until None: what does not fit one message follows."""
        actor = self.actors.get(actor_id)
        sender = self.senders.get(actor_id, actor.incarnation) if actor is not None else None
        return sender.take_ack() if sender is not None else None

    def tick(self, now: float) -> list[Effect]:
        """Let time pass: silent actors are evicted, dead leases and overdue groups go back to the pool."""
        effects = []
        for actor in list(self.actors.values()):
            if now - actor.heard_at >= self.settings.dead_after_s:
                effects.append(Effect("evict", actor.actor_id, tuple(self.evict(actor.actor_id, now))))
        for actor in self.actors.values():
            for group_id, lease in self._open_leases(actor):
                if now - lease.renewed_at >= self.settings.lease_ttl_s:
                    self._counts["num_leases_expired"] += 1
                    self._release(group_id, now, failed=True, revoke=True)
        if self.settings.group_deadline_s > 0:
            self._enforce_group_deadline(now)
        effects.extend(self._take_revocations())
        self.check()
        return effects

    # --- inside -----------------------------------------------------------------------------------------------------

    def _refuse(self, actor_id: str, hello: Hello) -> Stop | None:
        if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
            return _stop(
                StopReason.PROTOCOL, 4, f"actor {actor_id} speaks protocols {hello.protocol_min} to "
                f"{hello.protocol_max}, this hub speaks {PROTOCOL}: install the hub's release of streamrl there",
            )
        if hello.run_id not in (None, self.run_id):
            return _stop(
                StopReason.WRONG_RUN, 6, f"actor {actor_id} belongs to run {hello.run_id}, this hub is of {self.run_id}"
            )
        if hello.incarnation == 0 or hello.next_seq == 0:
            return _stop(StopReason.PROTOCOL, 4, f"actor {actor_id}: incarnation and next_seq must not be 0")
        if self.senders.is_fenced(actor_id, hello.incarnation):
            return _stop(
                StopReason.FENCED, 3, f"a newer process took the name {actor_id}: give every actor a name of its own"
            )
        wrong = outbox_error(hello.outbox, hello.next_seq, self.settings.dedupe_window)
        return None if wrong is None else _stop(StopReason.PROTOCOL, 4, f"actor {actor_id}: {wrong}")

    def _bind(self, actor_id: str, hello: Hello, now: float) -> tuple[Actor, int | None]:
        """The actor of this HELLO, made anew for a new incarnation."""
        actor = self.actors.get(actor_id)
        if actor is not None and actor.incarnation != hello.incarnation:
            self._part(actor, now, failed=True)
            actor = None
        _, fenced = self.senders.open(actor_id, hello.incarnation)
        if fenced is not None:
            self._counts["num_actor_restarts"] += 1
        if actor is None:
            survived_restart = self._restored and hello.run_id is not None
            actor = self.actors[actor_id] = Actor(actor_id, hello.incarnation, hello.slots, now, survived_restart)
        actor.state, actor.heard_at, actor.slots = "JOINING", now, max(hello.slots, len(actor.leases))
        actor.free = actor.free_eval = 0  # it says what is free once it has seen this answer
        actor.revocations.clear()
        self._set_installed(actor, hello.installed[0] if hello.installed is not None else None)
        return actor, fenced

    def _set_installed(self, actor: Actor, ref: VersionRef | None) -> None:
        """Weights from a dead branch do not count: the actor gets nothing until it has newer ones."""
        usable = ref is not None and self.versions.known(ref.learner_epoch, ref.version)
        actor.installed = ref if usable else None
        if actor.state != "LEAVING":
            actor.state = "READY" if usable else "JOINING"

    def _part(self, actor: Actor, now: float, *, failed: bool) -> list[LeaseRef]:
        """Its link is gone: leases back to the pool, deliveries remembered in case it returns."""
        refs = []
        for group_id, lease in self._open_leases(actor):
            refs.append((group_id, lease.attempt))
            self._release(group_id, now, failed=failed)
        del self.actors[actor.actor_id]
        self.senders.depart(actor.actor_id, actor.incarnation)
        return refs

    def _keep(self, actor: Actor, ref: LeaseRef, now: float) -> bool:
        """Whether a lease that a HELLO lists goes on: it must be this actor's, and nobody else must have the group."""
        group_id, attempt = ref
        if group_id & EVAL_BIT:
            item = self.evals.item(group_id)
            return item is not None and item.lease is not None and (item.lease.actor_id, item.lease.attempt) == (
                actor.actor_id, attempt
            )
        if group_id >= self.groups.next_id and not (actor.survived_restart and self._draw_upto(group_id)):
            return False
        record = self.groups.live.get(group_id)
        if record is None:
            return False
        if record.lease is not None:
            return (record.lease.actor_id, record.lease.attempt) == (actor.actor_id, attempt)
        grant = record.grants.get(attempt)
        mine = grant is not None and grant.actor_id == actor.actor_id
        full = len(actor.leases) >= actor.slots
        if record.state is not GroupState.READY or not (mine or actor.survived_restart) or full:
            return False
        missing = self._missing(record)
        members = grant.members if mine else missing
        if not set(members) <= set(missing):
            return False
        self._bind_lease(actor, record, attempt, members, now)
        return True

    def _orphan_the_rest(self, actor: Actor, hello: Hello, kept: set[LeaseRef], now: float) -> None:
        """Leases that its HELLO does not list: it lost them, or their groups are among what it will send again."""
        sender = self.senders.get(actor.actor_id, actor.incarnation)
        actor.resend_upto = hello.next_seq - 1
        for group_id, lease in self._open_leases(actor):
            lease.orphan = (group_id, lease.attempt) not in kept
            if lease.orphan and sender.settled.upto >= actor.resend_upto:
                self._release(group_id, now, failed=False)

    def _release_orphans(self, actor: Actor, now: float) -> None:
        """Its re-sends are in, so what is still orphaned was lost."""
        sender = self.senders.get(actor.actor_id, actor.incarnation)
        if sender.settled.upto >= actor.resend_upto:
            for group_id, lease in self._open_leases(actor):
                if lease.orphan:
                    self._release(group_id, now, failed=False)

    def _enforce_group_deadline(self, now: float) -> None:
        """Incomplete groups that are overdue: their lease ends, and `group_policy` says what follows."""
        deadline = self.settings.group_deadline_s
        for record in self.groups.in_order():
            partial = self.settings.group_policy == "accept_partial" and (
                len(record.members) >= self.settings.min_members
            )
            since = record.first_granted_at if partial or record.lease is None else record.lease.granted_at
            if since is None or now - since < deadline:
                continue
            if record.state is GroupState.LEASED:
                self._counts["num_groups_overdue"] += 1
                self._release(record.group_id, now, failed=True, revoke=True)
            elif record.state is GroupState.READY and partial:
                self._retry(record, now, failed=False)

    def _take_revocations(self) -> list[Effect]:
        effects = []
        for actor in self.actors.values():
            if actor.revocations:
                effects.append(Effect("revoke", actor.actor_id, tuple(actor.revocations)))
                actor.revocations.clear()
        return effects


def _stop(reason: StopReason, exit_code: int, detail: str) -> Stop:
    return Stop(reason=reason, rejoin=False, retry_after_s=0.0, exit_code=exit_code, detail=detail[:512])
