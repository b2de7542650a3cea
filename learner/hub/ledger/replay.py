"""Restoration of a ledger from the run's log: every change after a snapshot is done again, in its order.

No clock and no filter decides anything here: what happened stands in the records, whatever the settings of now would
have decided. Leases do not outlive their hub; their groups are READY, and remember who may come back with them.
"""

from __future__ import annotations

from learner.hub.ledger.cut import BatchCutter
from learner.hub.ledger.part import Part, Tables
from learner.hub.ledger.tables.groups import Delivery, Grant, GroupRecord, GroupState
from streamrl.errors import CheckpointError, WireError
from streamrl.stream.records import BatchCut, GroupArrived, GroupMoved, Record, StepTaken, VersionPublished


class Replay(Part):
    """Applies records to the tables of a ledger.

    Args:
        first_new: records before this one are in the snapshot; of them only frames are still to come.
    """

    def __init__(self, tables: Tables, first_new: int, cutter: BatchCutter) -> None:
        super().__init__(tables)
        self.first_new, self.cutter = first_new, cutter
        self._missing = {
            sequence: record for record in self.groups.in_order() if not record.frames for sequence in record.sequences
        }
        self._frames: dict[int, bytes] = {}

    @property
    def first_needed(self) -> int:
        """The first record of the log to apply."""
        return min(self._missing, default=self.first_new)

    def apply(self, sequence: int, record: Record) -> None:
        """Do again what a record says. Raises CheckpointError: it contradicts what came before it."""
        if sequence < self.first_new:
            if sequence in self._missing and isinstance(record, GroupArrived):
                self._frames[sequence] = record.frame
            return
        self.fill_frames()
        match record:
            case GroupArrived():
                self._arrived(sequence, record)
            case GroupMoved():
                self._moved(record)
            case BatchCut():
                self._cut(sequence, record)
            case StepTaken():
                self._trained(sequence, record)
            case VersionPublished():
                self.versions.was_published(record.manifest.ref)

    def fill_frames(self) -> None:
        """Put the frames of the snapshot's groups in place; called before anything can change these groups.

        Those whose frames the log does not hold are generated again.
        """
        if not self._missing:
            return
        for record in {record.group_id: record for record in self._missing.values()}.values():
            if all(sequence in self._frames for sequence in record.sequences):
                record.frames = [self._frames[sequence] for sequence in record.sequences]
            else:
                self.counts["lost_on_crash"] += len(record.sequences)
                self.lifecycle.again(record, "lost")
        self._missing.clear()
        self._frames.clear()

    def _live(self, group_id: int) -> GroupRecord | None:
        """The group, drawn if that has not happened yet; None if it has ended."""
        self.lifecycle.draw_upto(group_id, again=True)
        return self.groups.live.get(group_id)

    def _arrived(self, sequence: int, arrived: GroupArrived) -> None:
        entry = self.dedup.known(arrived.actor_id, arrived.incarnation)
        entry.settled.add(arrived.seq)
        entry.durable.add(arrived.seq)
        record = self._live(arrived.group_id)
        if arrived.refused or record is None:
            return
        try:
            _, members = self.lifecycle.read(arrived.frame)
        except WireError:  # the settings of now refuse it: without members its group is generated again
            return
        fresh = [one for one in members if not one.aborted]
        self.counts["num_members_accepted"] += len(fresh)
        self.counts["num_tokens_accepted"] += sum(one.num_action_tokens for one in fresh)
        record.add(fresh, arrived.frame, Delivery(arrived.actor_id, arrived.incarnation, arrived.seq), sequence)

    def _moved(self, moved: GroupMoved) -> None:
        record = self._live(moved.group_id)
        if record is None or record.state is GroupState.IN_BATCH:
            return
        record.holder = ""
        match GroupState(moved.state):
            case GroupState.LEASED:
                record.holder = moved.actor_id
                record.grants[moved.attempt] = Grant(moved.actor_id, moved.members)
                record.next_attempt = max(record.next_attempt, moved.attempt + 1)
                record.max_lag = max(record.max_lag, moved.max_lag)
            case GroupState.READY:
                if moved.discarded:
                    self.lifecycle.again(record, "")
                elif record.state is not GroupState.READY:
                    self.groups.move(record, GroupState.READY)
            case GroupState.HELD if record.members and record.state is GroupState.READY:
                self.counts["num_groups_accepted"] += 1
                self.groups.move(record, GroupState.HELD)
            case GroupState.DROPPED:
                self.lifecycle.drop(record, moved.reason)

    def _cut(self, sequence: int, cut: BatchCut) -> None:
        batch = [self.groups.live.get(group_id) for group_id in dict.fromkeys(row.group_id for row in cut.plan)]
        held = [record for record in batch if record is not None and record.state is GroupState.HELD]
        if len(held) != len(batch):
            raise CheckpointError(
                f"record {sequence} of the log cuts a batch at version {cut.version} of {len(batch)} groups, of which "
                f"{len(held)} are complete by then: log and checkpoint are not of one run"
            )
        for record in held:
            self.groups.move(record, GroupState.IN_BATCH)
        self.cutter.in_flight.append((cut.version, held))

    def _trained(self, sequence: int, step: StepTaken) -> None:
        try:
            self.cutter.trained(step.version, step.skipped, step.reason)
            if step.bounds is not None:
                self.lag.set_bounds(*step.bounds)
        except ValueError as error:
            raise CheckpointError(f"record {sequence} of the log: {error}") from error
