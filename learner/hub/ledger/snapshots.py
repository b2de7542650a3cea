"""The ledger inside the checkpoint: what makes at-least-once delivery an exactly-once effect.

A snapshot holds the dedup tables, every open group with its accepted frames, and the ends that no earlier checkpoint
holds. Restoring it *is* the proof that it was published, so those ends are durable from then on. Times are left out:
they belong to a clock that died.
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
    ended: list[Delivery]
    counts: dict[str, int]


def at_rest(record: GroupRecord) -> GroupRecord:
    """Copy a live group without what depends on this process: leases, batches and times."""
    # No lease outlives the process, and a batch whose step is not in the checkpoint must be trained again.
    state = {GroupState.LEASED: GroupState.READY, GroupState.IN_BATCH: GroupState.HELD}.get(record.state, record.state)
    holder = record.lease.actor_id if record.lease is not None else record.holder
    return msgspec.structs.replace(record, state=state, lease=None, first_granted_at=None, holder=holder)


def read_snapshot(data: bytes, *, run_id: str, learner_epoch: int) -> LedgerSnapshot:
    """Decode and check what `Ledger.freeze` wrote. Raises CheckpointError."""
    try:
        snapshot = msgspec.msgpack.decode(data, type=LedgerSnapshot)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"the ledger inside the checkpoint cannot be read: {error}") from error
    if snapshot.format != FORMAT:
        raise CheckpointError(f"the ledger has format {snapshot.format}, this build reads {FORMAT}")
    if snapshot.run_id != run_id:
        raise CheckpointError(f"the ledger belongs to run {snapshot.run_id}, not to {run_id}")
    if learner_epoch <= snapshot.learner_epoch:
        raise CheckpointError(f"learner_epoch {learner_epoch} must exceed {snapshot.learner_epoch}, which wrote this")
    return snapshot
