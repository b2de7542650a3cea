"""The ledger inside the checkpoint: what makes at-least-once delivery an exactly-once effect.

A snapshot holds the dedupe tables, every open group with its accepted frames, and the ends that no earlier checkpoint
holds. Restoring it *is* the proof that it was published, so those ends are durable from then on. Times are left out:
they belong to a clock that died.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec
from msgspec import Struct

from learner.hub.ledger.dedup import DedupRow, DedupTable
from learner.hub.ledger.groups import Delivery, GroupRecord, GroupState, SettledRow
from learner.hub.ledger.settings import LedgerSettings
from learner.hub.ledger.state import Books, SettledSinceCheckpoint
from learner.hub.ledger.versions import Versions, cut_lineage
from streamrl.errors import CheckpointError
from streamrl.messages import Lineage

FORMAT = 1


class LedgerState(Struct, array_like=True):
    """What `freeze` writes. Fields are only appended, with defaults."""

    format: int
    run_id: str
    learner_epoch: int
    version: int
    num_batches: int
    lineage: tuple[Lineage, ...]
    next_id: int
    done_below: int
    num_trained: int
    num_dropped: int
    cursor: int
    live: list[GroupRecord]
    settled: list[SettledRow]
    senders: list[DedupRow]
    fenced: list[tuple[str, list[int]]]
    ended: list[Delivery]
    counts: dict[str, int]


class Snapshots(Books):
    """freeze, saved, restore."""

    def freeze(self, version: int) -> bytes:
        """The ledger as of this version. Groups of a batch that is cut but not trained count as held.

        Raises:
            ValueError: the ledger is already at another version.
        """
        if version != self.version:
            raise ValueError(f"freeze({version}): the ledger is at version {self.version}")
        frozen = self._frozen.setdefault(version, SettledSinceCheckpoint())
        frozen.deliveries.extend(self._ends.deliveries)
        frozen.group_ids.extend(self._ends.group_ids)
        self._ends = SettledSinceCheckpoint()
        groups = self.groups
        state = LedgerState(
            format=FORMAT, run_id=self.run_id, learner_epoch=self.versions.learner_epoch, version=version,
            num_batches=self.versions.num_batches, lineage=cut_lineage(self.versions.lineage, version),
            next_id=groups.next_id, done_below=groups.done_below, num_trained=groups.num_trained,
            num_dropped=groups.num_dropped, cursor=self.prompts.cursor,
            live=[_at_rest(record) for record in groups.in_order()], settled=list(groups.settled.values()),
            senders=self.senders.rows(), fenced=self.senders.fenced_rows(),
            ended=[one for ends in self._frozen.values() for one in ends.deliveries], counts=dict(self._counts),
        )
        return msgspec.msgpack.encode(state)

    def saved(self, version: int) -> None:
        """The checkpoint of `freeze(version)` is published: what ended before it is durable, and acks say so.

        Earlier snapshots whose checkpoints failed are covered by this one.
        """
        if version not in self._frozen:
            raise ValueError(f"saved({version}): never frozen, or saved before; open are {sorted(self._frozen)}")
        for frozen in sorted(one for one in self._frozen if one <= version):
            ends = self._frozen.pop(frozen)
            for delivery in ends.deliveries:
                sender = self.senders.get(delivery.actor_id, delivery.incarnation)
                if sender is not None:
                    sender.make_durable(delivery.seq)
            self.groups.mark_saved(ends.group_ids)
        self.senders.saved()

    @classmethod
    def restore(cls, state: bytes, settings: LedgerSettings, *, run_id: str, learner_epoch: int, **rest: Any) -> Self:
        """The ledger of a learner that starts again from a checkpoint; `rest` as in the constructor.

        Leases that were out are READY again, at their old place; their actors have `dead_after_s` after the first HELLO
        to come back with them before others get them. Held groups stay held. Versions after the checkpoint are a dead
        branch.

        Raises:
            CheckpointError: the bytes are no ledger, of another run, or of a later start of the learner.
        """
        try:
            loaded = msgspec.msgpack.decode(state, type=LedgerState)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CheckpointError(f"the ledger inside the checkpoint cannot be read: {error}") from error
        if loaded.format != FORMAT:
            raise CheckpointError(f"the ledger has format {loaded.format}, this build reads {FORMAT}")
        if loaded.run_id != run_id:
            raise CheckpointError(f"the ledger belongs to run {loaded.run_id}, not to {run_id}")
        if learner_epoch <= loaded.learner_epoch:
            raise CheckpointError(f"learner_epoch {learner_epoch} must exceed {loaded.learner_epoch}, which wrote this")
        ledger = cls(settings, run_id=run_id, learner_epoch=learner_epoch, **rest)
        ledger._load(loaded, learner_epoch)
        return ledger

    def _load(self, loaded: LedgerState, learner_epoch: int) -> None:
        self.versions = Versions(
            learner_epoch, loaded.version, cut_lineage(loaded.lineage, loaded.version), loaded.num_batches
        )
        self.prompts.cursor = loaded.cursor
        self._counts.update(loaded.counts)
        groups = self.groups
        groups.next_id, groups.done_below = 0, loaded.done_below
        groups.num_trained, groups.num_dropped = loaded.num_trained, loaded.num_dropped
        groups.load(loaded.live, loaded.settled)
        groups.next_id = loaded.next_id
        self._live_allowed = groups.num_live()
        self._restored = True
        self.senders = DedupTable.load(self.settings.dedupe_window, loaded.senders, loaded.fenced)
        for delivery in loaded.ended:
            sender = self.senders.get(delivery.actor_id, delivery.incarnation)
            if sender is not None:
                sender.make_durable(delivery.seq)


def _at_rest(record: GroupRecord) -> GroupRecord:
    """A live group without what depends on this process: leases and times."""
    state = record.state
    if state is GroupState.LEASED:
        state = GroupState.READY
    elif state is GroupState.IN_BATCH:
        state = GroupState.HELD
    holder = record.lease.actor_id if record.lease is not None else record.holder
    return msgspec.structs.replace(record, state=state, lease=None, first_granted_at=None, holder=holder)
