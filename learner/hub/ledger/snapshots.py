"""The ledger inside the checkpoint, and its restoration: a snapshot, then the records of the log after it.

A snapshot holds the dedup tables and every open group; frames stay in the log, by the numbers of their records. Times
are left out: they belong to a clock that died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from learner.hub.ledger.apply import apply, end_leases, return_frames
from learner.hub.ledger.state import State
from learner.hub.ledger.tables.dedup import DedupRow
from learner.hub.ledger.tables.groups import Delivery, GroupRecord, GroupState, SettledRow
from learner.hub.ledger.tables.versions import cut_lineage
from streamrl.errors import CheckpointError
from streamrl.messages import Lineage
from streamrl.stream.records import GroupArrived, Record

Records = Callable[[int], Iterable[tuple[int, Record]]]
"""(sequence, record) of the log, from a sequence number on."""

FORMAT = 1


class LedgerSnapshot(Struct, array_like=True):
    """The form of the state in a checkpoint. Fields are only appended, with defaults."""

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
    cursor: int  # equal to `next_id`
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


def take_snapshot(state: State, run_id: str) -> bytes:
    """Encode the state as of now."""
    groups, versions = state.groups, state.versions
    return msgspec.msgpack.encode(LedgerSnapshot(
        format=FORMAT, run_id=run_id, learner_epoch=versions.learner_epoch, version=versions.current,
        num_batches=versions.current, lineage=cut_lineage(versions.lineage, versions.current),
        next_id=groups.next_id, done_below=groups.done_below, num_trained=groups.num_trained,
        num_dropped=groups.num_dropped, cursor=groups.next_id,
        live=[_at_rest(record) for record in groups.in_order()], settled=list(groups.settled.values()),
        senders=state.dedup.rows(), fenced=state.dedup.fenced_rows(),
        ended=[], counts=dict(state.counts), next_sequence=state.journal.next_sequence,
    ))


def _at_rest(record: GroupRecord) -> GroupRecord:
    """Copy a live group without what depends on this process (leases, batches, times), or is in the log (frames)."""
    # No lease outlives the process, and a batch whose step is not in the checkpoint must be trained again.
    state = {GroupState.LEASED: GroupState.READY, GroupState.IN_BATCH: GroupState.HELD}.get(record.state, record.state)
    frames = [] if record.sequences else record.frames
    return msgspec.structs.replace(record, state=state, lease=None, first_granted_at=None, frames=frames)


def load_snapshot(state: State, snapshot: LedgerSnapshot) -> None:
    """Fill a new state of the snapshot's version; `apply_log` follows, which brings the frames."""
    state.counts.update(snapshot.counts)
    state.groups.load(
        snapshot.live, snapshot.settled, next_id=snapshot.next_id, done_below=snapshot.done_below,
        num_trained=snapshot.num_trained, num_dropped=snapshot.num_dropped,
    )
    state.dedup.load(snapshot.senders, snapshot.fenced)


def apply_log(state: State, records: Records, first_new: int) -> None:
    """Apply the records of a log; those before `first_new` are in the state, which lacks only their frames.

    Raises CheckpointError: a record contradicts what came before it.
    """
    without = [record for record in state.groups.in_order() if not record.frames and record.sequences]
    needed = {sequence for record in without for sequence in record.sequences}
    frames: dict[int, bytes] = {}
    sequence = first_new - 1
    for sequence, record in records(min(needed, default=first_new)):
        if sequence >= first_new:
            while without:  # before anything can change these groups
                return_frames(state, without.pop(), frames)
            try:
                apply(state, sequence, record)
            except ValueError as error:
                raise CheckpointError(f"record {sequence} of the log: {error}") from error
        elif sequence in needed and isinstance(record, GroupArrived):
            frames[sequence] = record.frame
    while without:
        return_frames(state, without.pop(), frames)
    end_leases(state)
    state.journal.next_sequence = max(first_new, sequence + 1)


def read_snapshot(data: bytes, *, run_id: str = "", learner_epoch: int | None = None) -> LedgerSnapshot:
    """Decode and check what `take_snapshot` gave; run and epoch only where they are given. Raises CheckpointError."""
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
