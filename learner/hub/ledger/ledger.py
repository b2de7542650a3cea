"""The ledger: which actor generates which group, what arrived, what is trained, and what a crash must not lose.

    work           grant -> accept -> cut_batch -> end_batch    READY -> LEASED -> HELD -> IN_BATCH -> TRAINED
    time           tick: expired leases, silent actors, overdue groups
    durability     the journal, which the shell writes -> logged; freeze -> saved; restore after a crash
    actors         hello -> beat, installed ... drain -> bye        (or suspend, distrust, evict)
    one table      evals.request and get: such verbs are the table's own

It is a pure state machine: no socket, no clock, no thread, no randomness. `now` is the caller's monotonic time in
seconds, and every answer is a value. Its promises:

    every prompt drawn ends exactly once, trained or dropped with a reason, and is live until then
    no (group, member) is trained twice in one surviving history, whatever is re-sent, reissued or restored
    no token is older than max_lag at a step that trains it; with the default max_lag the cut has nothing to throw away
    an actor never holds more training leases than it has slots

Each verb stands in the part that decides it (`membership`, `grant`, `accept`, `cut`, `lifecycle`, `explain`), from the
tables of `State`. What must survive a crash is changed by the records of the journal alone (`apply`).
"""

from __future__ import annotations

from typing import Any, Self

from learner.hub.ledger.accept import Acceptance
from learner.hub.ledger.actors import ActorTable, Effect
from learner.hub.ledger.apply import commit
from learner.hub.ledger.cut import BatchCutter
from learner.hub.ledger.explain import Explanations
from learner.hub.ledger.grant import Grants
from learner.hub.ledger.lifecycle import GroupLifecycle
from learner.hub.ledger.membership import Membership
from learner.hub.ledger.snapshots import Records, apply_log, load_snapshot, read_snapshot, take_snapshot
from learner.hub.ledger.state import State
from learner.hub.ledger.tables.dedup import DedupEntry
from learner.hub.ledger.tables.filters import GroupFilter
from learner.hub.ledger.tables.groups import GroupState
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import cut_lineage
from streamrl.messages import Ack, Manifest, RejectReason
from streamrl.stream.records import VersionPublished

_ALWAYS = (
    "num_groups_leased", "num_groups_accepted", "num_groups_trained", "num_groups_stale", "num_duplicates_dropped",
    "num_leases_reissued", "num_leases_retried", "num_episodes_failed", "num_groups_completed", "num_groups_zero_std",
    "num_groups_filtered", "num_groups_dropped", "num_groups_partial", "num_groups_overdue", "num_groups_quarantined",
    "num_lag_violations", "num_members_accepted", "num_members_aborted", "num_tokens_accepted", "num_tokens_stale",
    "num_tokens_discarded", "num_repeats", "num_evictions", "num_leases_expired", "num_leases_lost",
    "num_eval_leases", "num_eval_groups", "num_eval_discarded", "num_evals_started_again", "num_actor_restarts",
    "num_installs", "num_install_failures", "lost_on_crash", "num_groups_refused_on_resume", "num_groups_distrusted",
    *(f"num_rejected_{reason.name.lower()}" for reason in RejectReason if reason is not RejectReason.NONE),
)


class Ledger(State):
    """The state machine that the module describes.

    Args:
        keep_group: filter of complete groups.
        restarted: the run had a hub before, whose actors may come back.
        rest: as `State` takes it.
    """

    def __init__(
        self, settings: LedgerSettings, *, run_id: str, keep_group: GroupFilter | None = None, restarted: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(settings, **rest)
        self.run_id = run_id
        self.refused_on_resume: list[str] = []
        self._frozen: dict[int, list[int]] = {}  # version of a snapshot -> groups that it has as ended
        self.lifecycle = GroupLifecycle(self, keep_group)
        self.actors = ActorTable(self.lifecycle, self.evals, restored=restarted or self.versions.learner_epoch > 1)
        self.cutter = BatchCutter(self, self.lifecycle)
        # Work.
        grants = Grants(self, self.lifecycle, self.actors)
        self.grant_order, self.grant = grants.order, grants.grant
        self.accept = Acceptance(self, self.lifecycle, self.actors).accept
        self.cut_batch, self.end_batch = self.cutter.cut_batch, self.cutter.end_batch
        # Actors.
        membership = self._membership = Membership(self, self.lifecycle, self.actors)
        self.hello, self.beat, self.installed = membership.hello, membership.beat, membership.installed
        self.suspend, self.distrust = membership.suspend, membership.distrust
        self.drain, self.bye, self.evict = membership.drain, membership.bye, membership.evict
        # Sentences for a person.
        explanations = Explanations(self, self.cutter, self.actors)
        self.wait_reason, self.actor_status = explanations.wait_reason, explanations.actor_status

    def publish(self, manifest: Manifest) -> None:
        """Note that a version was announced, with its record. Raises ValueError: versions only go up."""
        self.versions.check_next(manifest.ref)
        commit(self, VersionPublished(manifest))

    # --- durability ---------------------------------------------------------------------------------------------------

    def freeze(self, version: int) -> bytes:
        """Encode the ledger as of this version. Groups of a batch that is cut but not trained count as held.

        Raises ValueError: the ledger is already at another version.
        """
        if version != self.version:
            raise ValueError(f"freeze({version}): the ledger is at version {self.version}")
        self._frozen[version] = list(self.groups.settled)
        return take_snapshot(self, self.run_id)

    def logged(self, sequence: int) -> None:
        """Make durable what the journal's records up to this number hold; acks say so."""
        self.dedup.make_durable(self.journal.synced(sequence))

    def saved(self, version: int) -> None:
        """Forget what ended before `freeze(version)`, whose checkpoint is published now.

        Earlier snapshots whose checkpoints failed are covered by this one.
        """
        if version not in self._frozen:
            raise ValueError(f"saved({version}): never frozen, or saved before; open are {sorted(self._frozen)}")
        self.groups.mark_saved(self._frozen[version])
        self._frozen = {frozen: ended for frozen, ended in self._frozen.items() if frozen > version}
        self.dedup.saved()

    @classmethod
    def restore(
        cls, snapshot: bytes | None, settings: LedgerSettings, *, run_id: str, learner_epoch: int,
        records: Records = lambda first: (), **rest: Any,
    ) -> Self:
        """Make the ledger of a learner that starts again; `rest` as in the constructor.

        Leases that were out are READY again, at their old place; others get them once no actor of the run before has
        come back for `dead_after_s`, or `RETURN_WITHIN` times that after the first HELLO. Held groups stay held, unless
        the settings of now refuse them: `refused_on_resume` says why.

        Args:
            snapshot: what `freeze` gave; None starts from the log alone.
            records: gives (sequence, record) of the log from a sequence number on.
        Raises:
            CheckpointError: the bytes are no ledger, of another run, or of a later start of the learner; or the log
                contradicts them.
        """
        loaded = None if snapshot is None else read_snapshot(snapshot, run_id=run_id, learner_epoch=learner_epoch)
        if loaded is not None:
            rest = {"lineage": cut_lineage(loaded.lineage, loaded.version), **rest, "version": loaded.version}
        ledger = cls(settings, run_id=run_id, learner_epoch=learner_epoch, restarted=True, **rest)
        if loaded is not None:
            load_snapshot(ledger, loaded)
        apply_log(ledger, records, 1 if loaded is None else loaded.next_sequence)
        ledger.lag.count_on(len(batch) for _, batch in ledger.in_flight)
        lifecycle = ledger.lifecycle
        for record in ledger.groups.in_state(GroupState.READY):
            if not lifecycle.missing(record):  # the log ends between its last members and what became of it
                lifecycle.hold(record)
        ledger.lag.allow_drawn()  # the new settings may have a smaller eta than the run had
        # Last, because a held group that goes back to the pool changes every table.
        ledger.refused_on_resume = lifecycle.check_frames()
        return ledger

    # --- acks ---------------------------------------------------------------------------------------------------------

    def num_leases(self, actor_id: str) -> int:
        """Count the open leases of an actor; 0 for one that is not linked."""
        actor = self.actors.get(actor_id)
        return 0 if actor is None else len(actor.open_leases())

    def acks_due(self) -> list[str]:
        """List linked actors with something to be told."""
        linked = ((self.actors.get(actor_id), incarnation) for actor_id, incarnation in self.dedup.due)
        return [actor.actor_id for actor, incarnation in linked if actor and actor.incarnation == incarnation]

    def num_to_accept(self, actor_id: str) -> int:
        """Return how many accepted groups the next ACK for this actor tells of."""
        entry = self._entry(actor_id)
        return entry.num_to_accept if entry is not None else 0

    def take_acks(self, actor_id: str) -> Ack | None:
        """Take the next ACK for this actor, or None. Ask again until None: what does not fit one message follows."""
        entry = self._entry(actor_id)
        return entry.take_ack() if entry is not None else None

    def _entry(self, actor_id: str) -> DedupEntry | None:
        actor = self.actors.get(actor_id)
        return self.dedup.get(actor_id, actor.incarnation) if actor is not None else None

    # --- the rest -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Let time pass: silent actors are evicted, expired leases and overdue groups go back to the pool."""
        effects = self._membership.tick(now)
        self.check()  # on every tick: a broken invariant must not reach a checkpoint
        return effects

    @property
    def version(self) -> int:
        return self.versions.current

    def counters(self) -> dict[str, float]:
        """Report everything counted since the run began, and how many groups and leases there are now."""
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
