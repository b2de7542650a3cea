"""Decisions about one group that several verbs share: tried again, held, dropped, generated again."""

from __future__ import annotations

from learner.hub.ledger.apply import commit, draw_through
from learner.hub.ledger.state import Part, State
from learner.hub.ledger.tables.filters import GroupFilter
from learner.hub.ledger.tables.groups import GroupRecord, GroupState, read_frame
from streamrl.errors import WireError
from streamrl.messages.validate import is_scorable
from streamrl.stream.records import GroupMoved


class GroupLifecycle(Part):
    """Decides what becomes of a group that has no lease any more."""

    def __init__(self, state: State, keep_group: GroupFilter | None) -> None:
        super().__init__(state)
        self.keep_group = keep_group

    def draw_through(self, group_id: int) -> bool:
        """Draw all groups up to this number if capacity allows; returns whether it does."""
        if group_id - self.groups.next_id + 1 > self.lag.num_free:
            return False
        draw_through(self.state, group_id)
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
            self.hold(record)
        elif exhausted:
            self.drop(record, "attempts")
        else:
            # One attempt must then make all members: siblings of different attempts may be many versions apart.
            whole = settings.group_policy == "reissue_whole"
            self._make_ready(record, discarded=whole or not record.frames)

    def hold(self, record: GroupRecord) -> None:
        """Hold a complete group: it waits for a batch, unless the filter drops it."""
        commit(self.state, GroupMoved(record.group_id, GroupState.HELD, discarded=not record.frames))
        # Filtered here and not at the cut, so that a replacement is drawn while the batch still waits.
        if self.keep_group is not None and (reason := self.keep_group(self.lag.held(record))) is not None:
            self.drop(record, reason)

    def drop(self, record: GroupRecord, reason: str) -> None:
        """End a group untrained."""
        self.state.passed_over.add(record.group_id, record.frames, record.origins, reason)
        commit(self.state, GroupMoved(record.group_id, GroupState.DROPPED, reason))

    def expire_stale(self, record: GroupRecord) -> None:
        """Generate a group again, or drop it, that is too old by L2 and has no lease. Nothing of it survives."""
        self.counts["num_groups_stale"] += 1
        self.counts["num_tokens_stale"] += sum(one.num_action_tokens for one in record.members.values())
        record.num_failures += 1
        if self.settings.on_stale == "drop" or record.num_failures >= self.settings.max_attempts:
            self.drop(record, "stale")
        else:
            self.requeue(record, "stale")

    def requeue(self, record: GroupRecord, reason: str) -> None:
        """Generate a group without a lease again: what arrived of it cannot be trained."""
        self.state.passed_over.add(record.group_id, record.frames, record.origins, reason)
        self._make_ready(record, discarded=True)

    def check_frames(self) -> list[str]:
        """Check what a checkpoint held as if it arrived now: what cannot be trained is generated again. Says why."""
        refused = []
        for record in self.groups.in_order():
            why = next(filter(None, map(self._untrainable, record.frames)), None)
            if why is not None:
                self.counts["num_groups_refused_on_resume"] += 1
                self._make_ready(record, discarded=True)
                refused.append(why)
        return refused

    def _untrainable(self, frame: bytes) -> str | None:
        try:
            group, _ = read_frame(frame, self.settings.limits)
        except WireError as error:
            return str(error)
        wild = next((one for one in group.samplings if not is_scorable(one)), None)
        return None if wild is None else f"group {group.group_id} was drawn with {wild}"

    def _make_ready(self, record: GroupRecord, *, discarded: bool) -> None:
        if discarded or record.state is not GroupState.READY:
            commit(self.state, GroupMoved(record.group_id, GroupState.READY, discarded=discarded))
