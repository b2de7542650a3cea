"""Transitions of a group that several verbs share: drawn, tried again, held, dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from learner.hub.ledger.tables.dedup import DedupTable
from learner.hub.ledger.tables.filters import GroupFilter
from learner.hub.ledger.tables.groups import GroupRecord, GroupState, GroupTable
from learner.hub.ledger.tables.journal import Journal
from learner.hub.ledger.tables.passed_over import PassedOver
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import LagBounds
from streamrl.errors import WireError
from streamrl.messages import TO_HUB, Group
from streamrl.messages.codec import Decoder
from streamrl.messages.validate import MemberSummary, check_group, is_scorable
from streamrl.stream.records import GroupMoved

GROUPS = Decoder({Group.KIND: TO_HUB[Group.KIND]}, max_bytes=1 << 32)
_ANY_MEMBER = range(1 << 16)


@dataclass
class GroupLifecycle:
    """Moves one group at a time, with everything that such a move does to the other tables."""

    settings: LedgerSettings
    groups: GroupTable
    dedup: DedupTable
    lag: LagBounds
    prompts: PromptStream
    keep_group: GroupFilter | None
    counts: Counter[str]
    passed_over: PassedOver
    journal: Journal

    def draw(self) -> GroupRecord:
        """Draw the next prompt of the stream as a READY group; callers check capacity."""
        prompt = self.prompts.draw()
        record = GroupRecord(self.groups.next_id, prompt.prompt_index, prompt.pass_index)
        self.groups.add(record)
        return record

    def draw_upto(self, group_id: int, *, again: bool = False) -> bool:
        """Draw all groups up to this number, if capacity allows: a group's prompt follows from its number.

        Those that the log names were drawn before: they are drawn `again`, whatever the capacity is now.
        """
        if not again and group_id - self.groups.next_id + 1 > self.lag.num_free:
            return False
        while self.groups.next_id <= group_id:
            self.draw()
        return True

    def missing(self, record: GroupRecord) -> tuple[int, ...]:
        """List members that no attempt has completed yet."""
        return tuple(i for i in range(self.settings.group_size) if i not in record.members)

    def retry(self, record: GroupRecord, now: float, *, failed: bool) -> None:
        """End an attempt with members missing: by policy the group waits again, is held as it is, or dropped."""
        settings = self.settings
        record.num_failures += failed
        exhausted = record.num_failures >= settings.max_attempts
        enough = settings.group_policy == "accept_partial" and len(record.members) >= settings.min_members
        first = record.first_granted_at
        due = settings.group_deadline_s == 0 or (first is not None and now - first >= settings.group_deadline_s)
        # Enough members are better than none even when no attempt is left, so this comes before dropping.
        if enough and (exhausted or due):
            self.counts["num_groups_partial"] += 1
            self.hold(record)
        elif exhausted:
            self.drop(record, "attempts")
        else:
            # One attempt must then make all members: siblings of different attempts may be many versions apart.
            if settings.group_policy == "reissue_whole" and record.members:
                self._discard(record)
            self._make_ready(record)

    def hold(self, record: GroupRecord) -> None:
        """Hold a complete group: it waits for a batch, unless the filter drops it."""
        record.holder = ""
        self._move(record, GroupState.HELD)
        rewards = [member.reward for member in record.members.values()]
        self.counts["num_groups_completed"] += 1
        self.counts["num_groups_zero_std"] += len(rewards) > 1 and min(rewards) == max(rewards)
        # Filtered here and not at the cut, so that a replacement is drawn while the batch still waits.
        if self.keep_group is not None and (reason := self.keep_group(self.lag.held(record))) is not None:
            self.counts["num_groups_filtered"] += 1
            self.drop(record, reason)

    def drop(self, record: GroupRecord, reason: str) -> None:
        """End a group untrained; its place in capacity is free at once."""
        self.counts["num_groups_dropped"] += 1
        self.counts[f"num_dropped_{reason}"] += 1
        if record.state is not GroupState.IN_BATCH:  # else it was in a step, though that was skipped: the log has it
            self.passed_over.add(record.group_id, record.frames, record.origins, reason)
            self.journal.append(GroupMoved(record.group_id, GroupState.DROPPED, reason))
        self._discard(record)
        self.groups.settle(record, GroupState.DROPPED, reason)

    def expire_stale(self, record: GroupRecord) -> None:
        """Generate a group again, or drop it, that is too old by L2 and has no lease. Nothing of it survives."""
        self.counts["num_groups_stale"] += 1
        self.counts["num_tokens_stale"] += sum(one.num_action_tokens for one in record.members.values())
        record.num_failures += 1
        if self.settings.on_stale == "drop" or record.num_failures >= self.settings.max_attempts:
            self.drop(record, "stale")
            return
        self.again(record, "stale")

    def again(self, record: GroupRecord, reason: str) -> None:
        """Generate a group without a lease again: what arrived of it cannot be trained."""
        self.passed_over.add(record.group_id, record.frames, record.origins, reason)
        self._discard(record)
        self._make_ready(record)

    def check_frames(self) -> list[str]:
        """Check what a checkpoint held as if it arrived now: what cannot be trained is generated again. Says why."""
        refused = []
        for record in self.groups.in_order():
            why = next(filter(None, map(self._untrainable, record.frames)), None)
            if why is not None:
                self.counts["num_groups_refused_on_resume"] += 1
                self._discard(record)
                self._make_ready(record)
                refused.append(why)
        return refused

    def read(self, frame: bytes) -> tuple[Group, tuple[MemberSummary, ...]]:
        """Decode a frame that was accepted before, and check it. Raises WireError: the settings of now refuse it."""
        group = GROUPS.decode(frame)
        assert isinstance(group, Group)
        return group, check_group(group, self.settings.limits, _ANY_MEMBER)

    def _untrainable(self, frame: bytes) -> str | None:
        try:
            group, _ = self.read(frame)
        except WireError as error:
            return str(error)
        return None if is_scorable(group.sampling) else f"group {group.group_id} was drawn with {group.sampling}"

    def _make_ready(self, record: GroupRecord) -> None:
        if record.state is not GroupState.READY:
            self._move(record, GroupState.READY)
        elif not record.frames:  # what had arrived of it is gone
            self.journal.append(GroupMoved(record.group_id, GroupState.READY, discarded=True))

    def _move(self, record: GroupRecord, state: GroupState) -> None:
        self.groups.move(record, state)
        self.journal.append(GroupMoved(record.group_id, state, discarded=not record.frames))

    def _discard(self, record: GroupRecord) -> None:
        """Forget what was accepted for this group; its senders may forget it too."""
        # Before the log has it on the disk: after a crash the group would only be generated again.
        self.counts["num_tokens_discarded"] += sum(one.num_action_tokens for one in record.members.values())
        self.dedup.make_durable(record.deliveries)
        record.members, record.frames, record.deliveries, record.sequences = {}, [], [], []
