"""Linked actors: how a HELLO binds one to its link, their heartbeats and installs, how they leave, and time-outs.

Time ends silent actors, leases without progress, overdue groups, and evaluations that wait too long for their actors.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.hub.ledger.actors import ActorTable, Effect
from learner.hub.ledger.lifecycle import GroupLifecycle
from learner.hub.ledger.state import Part, State
from learner.hub.ledger.tables.actor import MAX_LEASES, Actor
from learner.hub.ledger.tables.dedup import outbox_error
from learner.hub.ledger.tables.evals import EvalRun
from learner.hub.ledger.tables.groups import GroupState
from streamrl.messages import (
    ANSWERED_STEPS,
    EVAL_BIT,
    ActorHeartbeat,
    Hello,
    LeaseRef,
    SeqRange,
    Stop,
    StopReason,
    VersionRef,
)

EXIT_CODES = {
    StopReason.FINISHED: 0, StopReason.FENCED: 3, StopReason.PROTOCOL: 4, StopReason.AUTH: 5, StopReason.WRONG_RUN: 6,
}


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


class Membership(Part):
    """Keeps the table of actors true to what they say; any message proves that an actor lives."""

    def __init__(self, state: State, lifecycle: GroupLifecycle, actors: ActorTable) -> None:
        super().__init__(state)
        self.lifecycle, self.actors = lifecycle, actors

    # --- the handshake ------------------------------------------------------------------------------------------------

    def hello(self, actor_id: str, hello: Hello, now: float) -> JoinResult:
        """Bind an actor to its link, or refuse it. The newest incarnation wins; a superseded one never returns."""
        stop = self._refuse(actor_id, hello)
        if stop is not None:
            return JoinResult(stop=stop)
        self.actors.start_grace(now, survived_restart=hello.run_id is not None)
        entry, fenced = self.dedup.open(actor_id, hello.incarnation)
        if fenced is not None:
            self.counts["num_actor_restarts"] += 1
        # Before leases are looked at: which of its numbers are settled decides which leases are orphans.
        entry.forget_all_but(hello.outbox, hello.next_seq)
        actor = self._bind(actor_id, hello, now)
        held = tuple((ref, self._keep(actor, ref, now)) for ref in hello.held)
        # A lease that this HELLO does not list is lost, unless its group is among what the actor will send again.
        kept = {ref for ref, keeps in held if keeps}
        for group_id, lease in actor.open_leases():
            lease.orphan = (group_id, lease.attempt) not in kept
        actor.resend_upto = hello.next_seq - 1
        self.actors.release_orphans(actor, entry, now)
        return JoinResult(
            settled_upto=entry.settled.upto, settled=entry.settled.ranges(),
            durable_upto=entry.durable.upto, durable=entry.durable.ranges(), held=held, fenced=fenced,
        )

    def _refuse(self, actor_id: str, hello: Hello) -> Stop | None:
        if hello.incarnation == 0 or hello.next_seq == 0:
            return stop_of(StopReason.PROTOCOL, f"actor {actor_id}: incarnation and next_seq must not be 0")
        if self.dedup.is_fenced(actor_id, hello.incarnation):
            detail = f"a newer process took the name {actor_id}: give every actor a name of its own"
            return stop_of(StopReason.FENCED, detail)
        wrong = outbox_error(hello.outbox, hello.next_seq, self.dedup.window)
        return None if wrong is None else stop_of(StopReason.PROTOCOL, f"actor {actor_id}: {wrong}")

    def _bind(self, actor_id: str, hello: Hello, now: float) -> Actor:
        """Make or renew the actor of a HELLO; a new incarnation starts without the leases of the one before."""
        actor = self.actors.get(actor_id)
        if actor is not None and actor.incarnation != hello.incarnation:
            # The old process is gone or fenced. Its attempts count as failures, or a prompt that kills every process
            # that touches it would be leased forever.
            self.actors.remove(actor, now, failed=True)
            actor = None
        if actor is None:
            survived_restart = self.actors.restored and hello.run_id is not None
            actor = Actor(actor_id, hello.incarnation, now, survived_restart, moved_at=now)
            self.actors.add(actor)
        actor.state, actor.heard_at = "JOINING", now
        actor.train.limit = max(min(hello.max_leases, MAX_LEASES), len(actor.train.leases))
        actor.train.free = actor.eval.free = 0  # unknown until its first heartbeat after this answer
        actor.revocations.clear()
        actor.install(self.versions.usable(hello.installed[0] if hello.installed is not None else None))
        self.actors.shares.touch(actor)
        return actor

    def _keep(self, actor: Actor, ref: LeaseRef, now: float) -> bool:
        """Decide whether a lease that a HELLO lists goes on: it must be this actor's, its group with no other actor."""
        group_id, attempt = ref
        if group_id & EVAL_BIT:
            record = self.evals.record(group_id)
            return record is not None and record.is_with(actor.actor_id, attempt)
        # After a restart the actor may hold a group that was dispatched after the checkpoint: its number says which
        # prompt it is, so drawing up to it restores the record.
        if group_id >= self.groups.next_id and not (actor.survived_restart and self.lifecycle.draw_through(group_id)):
            return False
        record = self.groups.live.get(group_id)
        if record is None:
            return False
        if record.lease is not None:
            return record.is_with(actor.actor_id, attempt)
        mine = record.was_granted(actor.actor_id, attempt)
        full = len(actor.train.leases) >= actor.train.limit
        if record.state is not GroupState.READY or not (mine or actor.survived_restart) or full:
            return False
        # Another attempt may have completed some of its members since: then it would generate them twice.
        missing = self.lifecycle.missing(record)
        members = record.grants[attempt].members if mine else missing
        if not set(members) <= set(missing):
            return False
        self.actors.lease(actor, record, attempt, members, now)
        return True

    # --- while it is linked -------------------------------------------------------------------------------------------

    def beat(self, actor_id: str, beat: ActorHeartbeat, now: float) -> bool:
        """Note what an actor has free; renew its leases if it makes progress, but none it calls stuck or does not hold.

        False: no link, or a fenced one; answer STOP(NO_LINK).
        """
        actor = self.actors.get(actor_id)
        if actor is None or actor.incarnation != beat.incarnation:
            return False
        actor.heard_at = now
        actor.record_progress((beat.tokens_total, beat.stats.get(ANSWERED_STEPS, 0.0)), now)
        actor.train.free, actor.train.limit = beat.free, min(beat.max_leases or actor.train.limit, MAX_LEASES)
        actor.eval.free, actor.eval.limit = beat.free_eval, min(max(actor.eval.limit, beat.free_eval), MAX_LEASES)
        actor.install(self.versions.usable(beat.installed))
        self.actors.shares.touch(actor)
        self.actors.renew(actor, beat, now)
        return True

    def installed(self, actor_id: str, ref: VersionRef, ok: bool, now: float) -> None:
        """Note that an actor made a version live or refused it. The shell has checked that its root was published."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            self.counts["num_installs" if ok else "num_install_failures"] += 1
            if ok:
                actor.install(self.versions.usable(ref))
                self.actors.shares.touch(actor)

    def suspend(self, actor_id: str, now: float) -> None:
        """Stop an actor with untrusted weights: its leases go to others, and it gets none until `installed` says so."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            actor.install(None)
            self.actors.shares.touch(actor)
            for group_id, _ in actor.open_leases():
                self.actors.release(group_id, now, failed=False, revoke=True)

    def distrust(self, actor_id: str, now: float) -> None:
        """Cut an actor off that is not believed: groups with its data that no batch has are generated again."""
        self.disconnect(actor_id, now, failed=False)
        for record in self.groups.in_order():
            mine = any(one.actor_id == actor_id for one in record.deliveries)
            if not mine or record.state is GroupState.IN_BATCH:
                continue
            # The whole group, with the members of other actors: siblings share a baseline.
            self.counts["num_groups_distrusted"] += 1
            if record.lease is not None:
                self.actors.detach(record, revoke=True)
            self.lifecycle.requeue(record, "distrusted")

    def drain(self, actor_id: str, now: float) -> None:
        """Let an actor that is leaving finish the leases it has; it gets no new ones."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            actor.state = "LEAVING"
            self.actors.shares.touch(actor)

    def bye(self, actor_id: str, now: float) -> None:
        """Remove an actor that has left. What it still held goes back to the pool and counts as no failure."""
        self.disconnect(actor_id, now, failed=False)

    def evict(self, actor_id: str, now: float) -> list[LeaseRef]:
        """Cut an actor off for a fault of its own; its leases go back to the pool, each group at its old place."""
        if self.actors.get(actor_id) is not None:
            self.counts["num_evictions"] += 1
        return self.disconnect(actor_id, now, failed=True)

    def disconnect(self, actor_id: str, now: float, *, failed: bool) -> list[LeaseRef]:
        """Remove it; its leases go back to the pool, and count as failures of their groups if `failed`."""
        actor = self.actors.get(actor_id)
        if actor is None:
            return []
        refs = self.actors.remove(actor, now, failed=failed)
        self.dedup.depart(actor_id, actor.incarnation)  # what it delivered is remembered, in case it returns
        return refs

    def _heard(self, actor_id: str, now: float) -> Actor | None:
        actor = self.actors.get(actor_id)
        if actor is not None:
            actor.heard_at = now
        return actor

    # --- what has lasted too long -------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Let time pass; returns what the shell must do."""
        # Silent actors first: their leases then return by eviction, not one by one as expired.
        silent = [actor for actor in self.actors.all() if now - actor.heard_at >= self.settings.dead_after_s]
        effects = [Effect("evict", one.actor_id, tuple(self.evict(one.actor_id, now))) for one in silent]
        self.actors.expire_leases(now)
        if not self.groups.num(GroupState.READY) and self.lag.num_free <= 0:  # there is nothing else for who waits
            self.actors.spread(now)
        if self.settings.group_deadline_s > 0:
            self._expire_groups(now)
        self._check_pins(now)
        return effects + self.actors.take_revocations()

    def _check_pins(self, now: float) -> None:
        """Start evaluations again whose version no actor has; end those that keep actors from a newer one too long."""
        # A dead actor has left the table by now, and its leases are with the others that have the version.
        for run in self.evals.lost({one.installed.version for one in self.actors.all() if one.installed is not None}):
            self._end_leases(run, now)
            self.counts["num_evals_started_again"] += 1
            self.evals.start_again(run)
        for run in self.evals.overdue(self.versions.newest_published, now):
            self._end_leases(run, now)
            self.evals.give_up(run)

    def _end_leases(self, run: EvalRun, now: float) -> None:
        for record in run.records:
            if record.lease is not None:
                self.actors.release(record.group_id, now, failed=False, revoke=True)

    def _expire_groups(self, now: float) -> None:
        """End the leases of incomplete groups that are overdue; `group_policy` says what follows."""
        settings = self.settings
        for record in self.groups.in_order():
            partial = settings.group_policy == "accept_partial" and len(record.members) >= settings.min_members
            # A group that may be accepted as it is has waited since its first lease, any other since the present one.
            since = record.first_granted_at if partial or record.lease is None else record.lease.granted_at
            if since is None or now - since < settings.group_deadline_s:
                continue
            if record.state is GroupState.LEASED:
                self.counts["num_groups_overdue"] += 1
                self.actors.release(record.group_id, now, failed=True, revoke=True)
            elif record.state is GroupState.READY and partial:
                self.lifecycle.retry(record, now, failed=False)


def stop_of(reason: StopReason, detail: str, *, rejoin: bool = False, retry_after_s: float = 0.0) -> Stop:
    """Make the answer that ends a connection or a process, with its exit status."""
    return Stop(reason, rejoin, retry_after_s, EXIT_CODES.get(reason, 1), detail[:512])
