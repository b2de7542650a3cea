"""The ledger: which actor generates which group, what arrived, what is trained, and what a crash must not lose.

    work           grant -> accept -> cut_batch -> trained          READY -> LEASED -> HELD -> IN_BATCH -> TRAINED
    time           tick: expired leases, silent actors, overdue groups
    durability     the journal, which the shell writes -> logged; freeze -> saved; restore, replay after a crash
    actors         hello -> beat, installed ... drain -> bye        (or suspend, evict)
    one table      versions.published, lag.set_bounds, evals.request and get: such verbs are the table's own

It is a pure state machine: no socket, no clock, no thread, no randomness. `now` is the caller's monotonic time in
seconds, and every answer is a value. Its promises:

    every prompt drawn ends exactly once, trained or dropped with a reason, and is live until then
    no (group, member) is trained twice in one surviving history, whatever is re-sent, reissued or restored
    no token is older than max_lag at a step that trains it; with the default max_lag the cut has nothing to throw away
    an actor never holds more training leases than it has slots

It is composed of tables (`learner.hub.ledger.tables`), which its parts share: `membership`, `grant`, `accept`, `cut`,
`explain`. Their verbs are asked of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import msgspec

from learner.hub.ledger.accept import Acceptance
from learner.hub.ledger.cut import BatchCutter
from learner.hub.ledger.explain import Explanations
from learner.hub.ledger.grant import Grants
from learner.hub.ledger.membership import JoinResult, Membership
from learner.hub.ledger.part import Tables
from learner.hub.ledger.refusal import AcceptResult
from learner.hub.ledger.replay import Replay
from learner.hub.ledger.snapshots import FORMAT, LedgerSnapshot, at_rest, read_snapshot
from learner.hub.ledger.tables.actors import Effect
from learner.hub.ledger.tables.groups import GroupState, HeldGroup
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import cut_lineage
from streamrl.messages import Ack, ActorHeartbeat, Group, Hello, Lease, LeaseRef, RejectReason, VersionRef
from streamrl.stream.records import Record

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


class Ledger(Tables):
    """The state machine that the module describes."""

    def __init__(self, settings: LedgerSettings, *, run_id: str, **rest: Any) -> None:
        """Make it of new tables; `rest` as they take it."""
        super().__init__(settings, **rest)
        self.run_id = run_id
        self.refused_on_resume: list[str] = []
        self._frozen: dict[int, list[int]] = {}  # version of a snapshot -> groups that it has as ended
        self._membership, self._acceptance, self._grants = Membership(self), Acceptance(self), Grants(self)
        self.cutter = BatchCutter(self)
        self._explanations = Explanations(self, self.cutter)

    # --- work ---------------------------------------------------------------------------------------------------------

    def grant_order(self) -> list[str]:
        """List actors that could take what there is, in the order in which to ask for grants."""
        return self._grants.order()

    def grant(self, actor_id: str, now: float) -> list[Lease]:
        """Make leases for this actor, at most a fair share; ask the others too, then ask again."""
        return self._grants.grant(actor_id, now)

    def accept(self, actor_id: str, group: Group, frame: bytes | bytearray | memoryview, now: float) -> AcceptResult:
        """Judge a GROUP. `frame` is what arrived, preamble included; it is what the learner will be given."""
        return self._acceptance.accept(actor_id, group, frame, now)

    def check_version(self, version: int) -> None:
        """Raise ValueError if no batch can be cut for this version now."""
        self.cutter.check_version(version)

    def cut_batch(self, version: int) -> list[HeldGroup] | None:
        """Cut exactly B groups to be trained from this version on, in dispatch order; None if they must be waited for.

        Raises ValueError: `version` is not the learner's, nor that of the next batch ahead.
        """
        return self.cutter.cut_batch(version)

    def trained(self, version_after: int, skipped: bool, reason: str = "") -> None:
        """End the oldest batch in flight: trained, which led to `version_after`, or skipped and quarantined."""
        self.cutter.trained(version_after, skipped, reason)

    def why_waiting(self, now: float) -> str:
        """Say what the next batch waits for, in a sentence for a person."""
        return self._explanations.why_waiting(now)

    def what_it_does(self, actor_id: str, now: float, *, loads: bool = False) -> str:
        """Say what an actor works on, or what it waits for."""
        return self._explanations.what_it_does(actor_id, now, loads=loads)

    # --- durability ---------------------------------------------------------------------------------------------------

    def freeze(self, version: int) -> bytes:
        """Encode the ledger as of this version. Groups of a batch that is cut but not trained count as held.

        Raises ValueError: the ledger is already at another version.
        """
        if version != self.version:
            raise ValueError(f"freeze({version}): the ledger is at version {self.version}")
        groups = self.groups
        self._frozen[version] = list(groups.settled)
        return msgspec.msgpack.encode(LedgerSnapshot(
            format=FORMAT, run_id=self.run_id, learner_epoch=self.versions.learner_epoch, version=version,
            num_batches=version, lineage=cut_lineage(self.versions.lineage, version),
            next_id=groups.next_id, done_below=groups.done_below, num_trained=groups.num_trained,
            num_dropped=groups.num_dropped, cursor=self.prompts.cursor,
            live=[at_rest(record) for record in groups.in_order()], settled=list(groups.settled.values()),
            senders=self.dedup.rows(), fenced=self.dedup.fenced_rows(),
            ended=[], counts=dict(self.counts), next_sequence=self.journal.next_sequence,
        ))

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
        cls, state: bytes | None, settings: LedgerSettings, *, run_id: str, learner_epoch: int,
        records: Callable[[int], Iterable[tuple[int, Record]]] = lambda first: (), **rest: Any,
    ) -> Self:
        """Make the ledger of a learner that starts again; `rest` as in the constructor.

        Leases that were out are READY again, at their old place; others get them once no actor of the run before has
        come back for `dead_after_s`, or `RETURN_WITHIN` times that after the first HELLO. Held groups stay held, unless
        the settings of now refuse them: `refused_on_resume` says why.

        Args:
            state: what `freeze` gave; None starts from the log alone.
            records: gives (sequence, record) of the log from a sequence number on.
        Raises:
            CheckpointError: the bytes are no ledger, of another run, or of a later start of the learner; or the log
                contradicts them.
        """
        if state is None:
            ledger = cls(settings, run_id=run_id, learner_epoch=learner_epoch, restarted=True, **rest)
            first_new = 1
        else:
            loaded = read_snapshot(state, run_id=run_id, learner_epoch=learner_epoch)
            rest = {"lineage": cut_lineage(loaded.lineage, loaded.version), **rest, "version": loaded.version}
            ledger = cls(settings, run_id=run_id, learner_epoch=learner_epoch, restarted=True, **rest)
            first_new = loaded.next_sequence
            ledger.prompts.cursor = loaded.cursor
            ledger.counts.update(loaded.counts)
            ledger.groups.load(
                loaded.live, loaded.settled, next_id=loaded.next_id, done_below=loaded.done_below,
                num_trained=loaded.num_trained, num_dropped=loaded.num_dropped,
            )
            ledger.dedup.load(loaded.senders, loaded.fenced)
        ledger._replay(records, first_new)
        ledger.lag.allow_drawn()  # the new settings may have a smaller eta than the run had
        # Last, because a held group that goes back to the pool changes every table.
        ledger.refused_on_resume = ledger.lifecycle.check_frames()
        return ledger

    def _replay(self, records: Callable[[int], Iterable[tuple[int, Record]]], first_new: int) -> None:
        replay = Replay(self, first_new, self.cutter)
        sequence = first_new - 1
        self.journal.muted = True
        for sequence, record in records(replay.first_needed):
            replay.apply(sequence, record)
        replay.fill_frames()
        self.journal.muted = False
        self.journal.next_sequence = max(self.journal.next_sequence, sequence + 1)
        for record in list(self.groups.in_state(GroupState.READY)):
            if not self.lifecycle.missing(record):  # the log ends between its last members and what became of it
                self.lifecycle.hold(record)

    # --- actors -------------------------------------------------------------------------------------------------------

    def hello(self, actor_id: str, hello: Hello, now: float) -> JoinResult:
        """Bind an actor to its link, or refuse it. The newest incarnation wins; a superseded one never returns."""
        return self._membership.hello(actor_id, hello, now)

    def beat(self, actor_id: str, beat: ActorHeartbeat, now: float) -> bool:
        """Note what an actor has free; renew its leases if it makes progress, but none it calls stuck or does not hold.

        False: no link, or a fenced one; answer STOP(NO_LINK).
        """
        return self._membership.beat(actor_id, beat, now)

    def installed(self, actor_id: str, ref: VersionRef, ok: bool, now: float) -> None:
        """Note that an actor made a version live or refused it. The shell has checked that its root was published."""
        self._membership.installed(actor_id, ref, ok, now)

    def suspend(self, actor_id: str, now: float) -> None:
        """Stop an actor with untrusted weights: its leases go to others, and it gets none until `installed` says so."""
        self._membership.suspend(actor_id, now)

    def distrust(self, actor_id: str, now: float) -> None:
        """Cut an actor off that is not believed: groups with its data that no batch has are generated again."""
        self._membership.distrust(actor_id, now)

    def drain(self, actor_id: str, now: float) -> None:
        """Let an actor that is leaving finish the leases it has; it gets no new ones."""
        self._membership.drain(actor_id, now)

    def bye(self, actor_id: str, now: float) -> None:
        """Remove an actor that has left. What it still held goes back to the pool and counts as no failure."""
        self._membership.bye(actor_id, now)

    def evict(self, actor_id: str, now: float) -> list[LeaseRef]:
        """Cut an actor off; its leases go back to the pool, each group at its old place."""
        return self._membership.evict(actor_id, now)

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
        actor = self.actors.get(actor_id)
        entry = self.dedup.get(actor_id, actor.incarnation) if actor is not None else None
        return entry.num_to_accept if entry is not None else 0

    def take_acks(self, actor_id: str) -> Ack | None:
        """Take the next ACK for this actor, or None. Ask again until None: what does not fit one message follows."""
        actor = self.actors.get(actor_id)
        entry = self.dedup.get(actor_id, actor.incarnation) if actor is not None else None
        return entry.take_ack() if entry is not None else None

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
        drawn = self.groups.next_id
        assert self.prompts.cursor == drawn, f"{drawn} groups drawn, but the prompt cursor is {self.prompts.cursor}"
