"""The ledger inside the checkpoint, and its restoration: a snapshot, then the records of the log after it.

A snapshot holds the dedup tables and every open group; frames stay in the log, by the numbers of their records. Times
are left out: they belong to a clock that died.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from learner.hub.ledger.tables.dedup import DedupRow
from learner.hub.ledger.tables.groups import Delivery, GroupRecord, GroupState, SettledRow
from streamrl.errors import CheckpointError
from streamrl.messages import Lineage

FORMAT = 1


class LedgerSnapshot(Struct, array_like=True):
    """The form of what `Ledger.freeze` writes. Fields are only appended, with defaults."""

    format: int
    run_id: str
    learner_epoch: int
    version: int
    num_batches: int  # equal to `version`, whatever its name says; it stays because fields are read by position
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
    ended: list[Delivery]  # empty: durability is the log's; it stays because fields are read by position
    counts: dict[str, int]
    next_sequence: int = 0  # the log's records from this one on are not in it; 0 in snapshots older than the log

    @property
    def first_sequence(self) -> int:
        """The oldest record of the log that restoring this needs."""
        return min((one for record in self.live for one in record.sequences), default=self.next_sequence)


def at_rest(record: GroupRecord) -> GroupRecord:
    """Copy a live group without what depends on this process (leases, batches, times), or is in the log (frames)."""
    # No lease outlives the process, and a batch whose step is not in the checkpoint must be trained again.
    state = {GroupState.LEASED: GroupState.READY, GroupState.IN_BATCH: GroupState.HELD}.get(record.state, record.state)
    holder = record.lease.actor_id if record.lease is not None else record.holder
    frames = [] if record.sequences else record.frames
    return msgspec.structs.replace(
        record, state=state, lease=None, first_granted_at=None, holder=holder, frames=frames
    )


def read_snapshot(data: bytes, *, run_id: str = "", learner_epoch: int | None = None) -> LedgerSnapshot:
    """Decode and check what `Ledger.freeze` wrote; run and epoch only where they are given. Raises CheckpointError."""
    try:
        snapshot = msgspec.msgpack.decode(data, type=LedgerSnapshot)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"the ledger inside the checkpoint cannot be read: {error}") from error
    if snapshot.format != FORMAT:
        raise CheckpointError(f"the ledger has format {snapshot.format}, this build reads {FORMAT}")
    if run_id and snapshot.run_id != run_id:
        raise CheckpointError(f"the ledger belongs to run {snapshot.run_id}, not to {run_id}")
    if learner_epoch is not None and learner_epoch < snapshot.learner_epoch:
        raise CheckpointError(f"learner_epoch {learner_epoch} is below {snapshot.learner_epoch}, which wrote this")
    return snapshot
