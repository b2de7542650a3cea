"""The ledger: which actor generates which group, what arrived, what is trained, and what a crash must not lose.

    work           grant -> accept -> cut_batch -> trained          READY -> LEASED -> HELD -> IN_BATCH -> TRAINED
    time           tick: expired leases, silent actors, overdue groups
    durability     freeze -> saved; restore after a crash
    actors         hello -> beat, installed ... drain -> bye        (or suspend, evict)
    one table      versions.published, lag.set_bounds, evals.request and get: such verbs are the table's own

It is a pure state machine: no socket, no clock, no thread, no randomness. `now` is the caller's monotonic time in
seconds, and every answer is a value. Its promises:

    every prompt drawn ends exactly once, trained or dropped with a reason, and is live until then
    no (group, member) is trained twice in one surviving history, whatever is re-sent, reissued or restored
    no token is older than max_lag at a step that trains it; with the default max_lag the cut has nothing to throw away
    an actor never holds more training leases than it has slots

It is composed of tables (`groups`, `actors`, `dedup`, `evals`, `versions`) and of a part for each long verb (`grant`,
`accept`, `cut`, the handshake in `actors`); `lifecycle` has the transitions that parts share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from learner.hub.ledger.accept import Acceptance
from learner.hub.ledger.cut import BatchCutter
from learner.hub.ledger.grant import Grants
from learner.hub.ledger.handshake import Handshake
from learner.hub.ledger.snapshots import FORMAT, LedgerSnapshot, at_rest, read_snapshot
from learner.hub.ledger.tables.actors import MAX_LEASES, Actor, ActorTable, Effect
from learner.hub.ledger.tables.dedup import DedupTable
from learner.hub.ledger.tables.evals import EvalRun, EvalSource, EvalTable
from learner.hub.ledger.tables.filters import GroupFilter
from learner.hub.ledger.tables.groups import GroupState, GroupTable, SettledSinceCheckpoint
from learner.hub.ledger.tables.lifecycle import GroupLifecycle
from learner.hub.ledger.tables.passed_over import PassedOver
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import LagBounds, Versions, cut_lineage
from streamrl.messages import ANSWERED_STEPS, Ack, ActorHeartbeat, LeaseRef, Lineage, RejectReason, Sampling, VersionRef

_ALWAYS = (
    "sandbox_level",
    "num_groups_leased", "num_groups_accepted", "num_groups_trained", "num_groups_stale", "num_duplicates_dropped",
    "num_leases_reissued", "num_leases_retried", "num_episodes_failed", "num_groups_completed", "num_groups_zero_std",
    "num_groups_filtered", "num_groups_dropped", "num_groups_partial", "num_groups_overdue", "num_groups_quarantined",
    "num_lag_violations", "num_members_accepted", "num_members_aborted", "num_tokens_accepted", "num_tokens_stale",
    "num_tokens_discarded", "num_repeats", "num_evictions", "num_leases_expired", "num_leases_lost",
    "num_eval_leases", "num_eval_groups", "num_eval_discarded", "num_evals_started_again", "num_actor_restarts",
    "num_installs", "num_install_failures", "lost_on_crash", "num_groups_refused_on_resume", "num_groups_distrusted",
    *(f"num_rejected_{reason.name.lower()}" for reason in RejectReason if reason is not RejectReason.NONE),
)


class Ledger:
    """See the module."""

    def __init__(
        self, settings: LedgerSettings, *, run_id: str, learner_epoch: int, run_seed: int, prompts: PromptStream,
        sampling: Sampling, eval_sources: Mapping[str, EvalSource] | None = None,
        keep_group: GroupFilter = lambda group: None, version: int = 0, lineage: Sequence[Lineage] = (),
    ) -> None:
        self.settings = settings
        self.run_id = run_id
        self.prompts = prompts
        self.counts: Counter[str] = Counter()
        self.versions = Versions(learner_epoch, version, lineage)
        num_batches = version // settings.lag.steps_per_batch
        self.groups = GroupTable(num_trained=num_batches * settings.lag.groups_per_batch)
        prompts.cursor = self.groups.next_id
        self.dedup = DedupTable(settings.dedupe_window)
        self.evals = EvalTable(settings.max_attempts, settings.eval_keep_s)
        self.lag = LagBounds(settings, self.groups, self.versions)
        self.passed_over = PassedOver(settings.num_passed_over, run_seed)
        self.lifecycle = GroupLifecycle(
            settings, self.groups, self.dedup, self.lag, prompts, keep_group, self.counts, self.passed_over
        )
        self.actors = ActorTable(self.lifecycle, self.evals, restored=learner_epoch > 1)
        tables = (
            settings, self.counts, self.versions, self.groups, self.dedup, self.evals, self.lag, self.lifecycle,
            self.actors,
        )
        # The long verbs are their parts' own methods.
        self.hello = Handshake(*tables).hello
        self.eval_sources = eval_sources or {}
        self.accept = Acceptance(*tables, sampling, self.eval_sources).accept
        grants = Grants(*tables, run_seed, sampling, self.eval_sources)
        self.grant_order, self.grant, self.what_it_does = grants.order, grants.grant, grants.what_it_does
        self.cutter = BatchCutter(*tables)
        self.cut_batch, self.trained = self.cutter.cut_batch, self.cutter.trained
        self.why_waiting = self.cutter.why_waiting
        self.refused_on_resume: list[str] = []
        self._frozen: dict[int, SettledSinceCheckpoint] = {}  # version of a snapshot -> what ended since the one before

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Let time pass: silent actors are evicted, expired leases and overdue groups go back to the pool."""
        # Silent actors first: their leases then return by eviction, not one by one as expired.
        silent = [actor for actor in self.actors.all() if now - actor.heard_at >= self.settings.dead_after_s]
        effects = [Effect("evict", one.actor_id, tuple(self.evict(one.actor_id, now))) for one in silent]
        self.actors.expire_leases(now)
        if not self.groups.num(GroupState.READY) and self.lag.num_free <= 0:  # there is nothing else for who waits
            self.actors.spread(now)
        if self.settings.group_deadline_s > 0:
            self._expire_groups(now)
        self._check_pins(now)
        effects += self.actors.take_revocations()
        self.check()
        return effects

    def _check_pins(self, now: float) -> None:
        """No evaluation waits for a version that no actor has, or keeps actors from a newer one for too long."""
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
        """Incomplete groups that are overdue: their lease ends, and `group_policy` says what follows."""
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

    # --- durability ---------------------------------------------------------------------------------------------------

    def freeze(self, version: int) -> bytes:
        """The ledger as of this version. Groups of a batch that is cut but not trained count as held.

        Raises ValueError: the ledger is already at another version.
        """
        if version != self.version:
            raise ValueError(f"freeze({version}): the ledger is at version {self.version}")
        groups = self.groups
        self._frozen.setdefault(version, SettledSinceCheckpoint()).add(groups.take_recent())
        return msgspec.msgpack.encode(LedgerSnapshot(
            format=FORMAT, run_id=self.run_id, learner_epoch=self.versions.learner_epoch, version=version,
            num_batches=version, lineage=cut_lineage(self.versions.lineage, version),
            next_id=groups.next_id, done_below=groups.done_below, num_trained=groups.num_trained,
            num_dropped=groups.num_dropped, cursor=self.prompts.cursor,
            live=[at_rest(record) for record in groups.in_order()], settled=list(groups.settled.values()),
            senders=self.dedup.rows(), fenced=self.dedup.fenced_rows(),
            ended=[one for settled in self._frozen.values() for one in settled.deliveries], counts=dict(self.counts),
        ))

    def saved(self, version: int) -> None:
        """The checkpoint of `freeze(version)` is published: what ended before it is durable, and acks say so.

        Earlier snapshots whose checkpoints failed are covered by this one.
        """
        if version not in self._frozen:
            raise ValueError(f"saved({version}): never frozen, or saved before; open are {sorted(self._frozen)}")
        for frozen in sorted(one for one in self._frozen if one <= version):
            settled = self._frozen.pop(frozen)
            self.dedup.make_durable(settled.deliveries)
            self.groups.mark_saved(settled.group_ids)
        self.dedup.saved()

    @classmethod
    def restore(cls, state: bytes, settings: LedgerSettings, *, run_id: str, learner_epoch: int, **rest: Any) -> Self:
        """The ledger of a learner that starts again from a checkpoint; `rest` as in the constructor.

        Leases that were out are READY again, at their old place; others get them once no actor of the run before has
        come back for `dead_after_s`, or `RETURN_WITHIN` times that after the first HELLO. Held groups stay held, unless
        the settings of now refuse them: `refused_on_resume` says why. Versions after the checkpoint are a dead branch.
        Raises CheckpointError: the bytes are no ledger, of another run, or of a later start of the learner.
        """
        loaded = read_snapshot(state, run_id=run_id, learner_epoch=learner_epoch)
        rest |= {"version": loaded.version, "lineage": cut_lineage(loaded.lineage, loaded.version)}
        ledger = cls(settings, run_id=run_id, learner_epoch=learner_epoch, **rest)
        ledger.prompts.cursor = loaded.cursor
        ledger.counts.update(loaded.counts)
        ledger.groups.load(
            loaded.live, loaded.settled, next_id=loaded.next_id, done_below=loaded.done_below,
            num_trained=loaded.num_trained, num_dropped=loaded.num_dropped,
        )
        ledger.lag.allow_drawn()  # the new settings may have a smaller eta than the run had
        ledger.dedup.load(loaded.senders, loaded.fenced)
        ledger.dedup.make_durable(loaded.ended)
        ledger.refused_on_resume = ledger.lifecycle.check_frames()
        return ledger

    # --- actors -------------------------------------------------------------------------------------------------------

    def _heard(self, actor_id: str, now: float) -> Actor | None:
        """Any message proves that an actor lives."""
        actor = self.actors.get(actor_id)
        if actor is not None:
            actor.heard_at = now
        return actor

    def beat(self, actor_id: str, beat: ActorHeartbeat, now: float) -> bool:
        """Renew its leases if it makes progress, except those it calls stuck or does not hold; note what it has free.

        False: no link, or a fenced one; answer STOP(NO_LINK).
        """
        actor = self.actors.get(actor_id)
        if actor is None or actor.incarnation != beat.incarnation:
            return False
        actor.heard_at = now
        actor.show((beat.tokens_total, beat.stats.get(ANSWERED_STEPS, 0.0)), now)
        actor.train.free, actor.train.limit = beat.free, min(beat.max_leases or actor.train.limit, MAX_LEASES)
        actor.eval.free, actor.eval.limit = beat.free_eval, min(max(actor.eval.limit, beat.free_eval), MAX_LEASES)
        actor.install(self.versions.usable(beat.installed))
        self.actors.shares.touch(actor)
        self.actors.renew(actor, beat, now)
        return True

    def installed(self, actor_id: str, ref: VersionRef, ok: bool, now: float) -> None:
        """A version is live at this actor, or it refused it. The shell has checked that the root was published."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            self.counts["num_installs" if ok else "num_install_failures"] += 1
            if ok:
                actor.install(self.versions.usable(ref))
                self.actors.shares.touch(actor)

    def suspend(self, actor_id: str, now: float) -> None:
        """Its weights are not to be trusted: its leases go to others, and it gets none until `installed` says so."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            actor.install(None)
            self.actors.shares.touch(actor)
            for group_id, _ in actor.open_leases():
                self.actors.release(group_id, now, failed=False, revoke=True)

    def distrust(self, actor_id: str, now: float) -> None:
        """Cut an actor off that is not believed: groups with data of it, unless a batch has them, are generated again.

        As a group, with the other members too: siblings share a baseline.
        """
        self._disconnect(actor_id, now, failed=False)
        for record in self.groups.in_order():
            mine = any(one.actor_id == actor_id for one in record.deliveries)
            if not mine or record.state is GroupState.IN_BATCH:
                continue
            self.counts["num_groups_distrusted"] += 1
            if record.lease is not None:
                self.actors.detach(record, revoke=True)
            self.lifecycle.again(record, "distrusted")

    def drain(self, actor_id: str, now: float) -> None:
        """It is leaving: no new leases, but it may finish those it has."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            actor.state = "LEAVING"
            self.actors.shares.touch(actor)

    def bye(self, actor_id: str, now: float) -> None:
        """It has left. What it still held goes back to the pool and counts as no failure of the group."""
        self._disconnect(actor_id, now, failed=False)

    def evict(self, actor_id: str, now: float) -> list[LeaseRef]:
        """Cut an actor off; its leases go back to the pool, each group at its old place."""
        if self.actors.get(actor_id) is not None:
            self.counts["num_evictions"] += 1
        return self._disconnect(actor_id, now, failed=True)

    def _disconnect(self, actor_id: str, now: float, *, failed: bool) -> list[LeaseRef]:
        actor = self.actors.get(actor_id)
        if actor is None:
            return []
        refs = self.actors.remove(actor, now, failed=failed)
        self.dedup.depart(actor_id, actor.incarnation)  # what it delivered is remembered, in case it returns
        return refs

    def num_leases(self, actor_id: str) -> int:
        """Open leases of an actor; 0 for one that is not linked."""
        actor = self.actors.get(actor_id)
        return 0 if actor is None else len(actor.open_leases())

    def acks_due(self) -> list[str]:
        """Linked actors with something to be told."""
        linked = ((self.actors.get(actor_id), incarnation) for actor_id, incarnation in self.dedup.due)
        return [actor.actor_id for actor, incarnation in linked if actor and actor.incarnation == incarnation]

    def take_acks(self, actor_id: str) -> Ack | None:
        """The next ACK for this actor, or None. Ask again until None: what does not fit one message follows."""
        actor = self.actors.get(actor_id)
        entry = self.dedup.get(actor_id, actor.incarnation) if actor is not None else None
        return entry.take_ack() if entry is not None else None

    # --- the rest -----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.versions.current

    def counters(self) -> dict[str, float]:
        """Everything counted since the run began, and how many groups and leases there are now."""
        counts = {
            **dict.fromkeys(_ALWAYS, 0), **self.counts,
            "num_groups_drawn": self.groups.next_id,
            "num_groups_ready": self.groups.num(GroupState.READY),
            "num_leases_open": self.groups.num(GroupState.LEASED),
            "num_groups_queued": self.groups.num(GroupState.HELD),
            "num_groups_in_batch": self.groups.num(GroupState.IN_BATCH),
            "num_actors": len(self.actors), "eta": self.lag.rule.eta, "max_lag": self.lag.rule.max_lag,
        }
        return {name: float(value) for name, value in counts.items()}

    def check(self) -> None:
        """Assert what must hold between any two verbs; cheap enough for every tick."""
        self.groups.check()
        self.lag.check()
        self.actors.check(self.groups)
        drawn = self.groups.next_id
        assert self.prompts.cursor == drawn, f"{drawn} groups drawn, but the prompt cursor is {self.prompts.cursor}"
