"""Groups: their states, what is known of each, and the table that keeps dispatch order.

    READY -> LEASED -> HELD -> IN_BATCH -> TRAINED
      ^________|________|         |
               |________|_________|_____-> DROPPED(reason)

A group is drawn once, in READY, and ends exactly once, in TRAINED or DROPPED. Until then it is *live*. Its number is
its place in dispatch order and never changes, whatever becomes of its leases.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum

from msgspec import Struct

from streamrl.messages import TO_HUB, Group, GroupOrigin, Limits
from streamrl.messages.codec import Decoder
from streamrl.messages.validate import MemberSummary, check_group

GROUPS = Decoder({Group.KIND: TO_HUB[Group.KIND]}, max_bytes=1 << 32)
_ANY_MEMBER = range(1 << 16)


def read_frame(frame: bytes, limits: Limits) -> tuple[Group, tuple[MemberSummary, ...]]:
    """Decode a frame that was accepted before, and check it. Raises WireError: the settings of now refuse it."""
    group = GROUPS.decode(frame)
    assert isinstance(group, Group)
    return group, check_group(group, limits, _ANY_MEMBER)


class GroupState(IntEnum):
    READY = 0
    LEASED = 1
    HELD = 2
    IN_BATCH = 3
    TRAINED = 4
    DROPPED = 5


_LEGAL = {
    GroupState.READY: {GroupState.LEASED, GroupState.HELD, GroupState.DROPPED},
    GroupState.LEASED: {GroupState.READY, GroupState.HELD, GroupState.DROPPED},
    GroupState.HELD: {GroupState.READY, GroupState.IN_BATCH, GroupState.DROPPED},
    GroupState.IN_BATCH: {GroupState.TRAINED, GroupState.DROPPED},
}


class Delivery(Struct, array_like=True, frozen=True, gc=False):
    """The origin of accepted bytes: the key that an ack names."""

    actor_id: str
    incarnation: int
    seq: int


class Grant(Struct, array_like=True, frozen=True):
    """The actor that was given an attempt, and the members."""

    actor_id: str
    members: tuple[int, ...]


class OpenLease(Struct):
    """The lease that is out now. Times are the caller's monotonic seconds."""

    attempt: int
    actor_id: str
    members: tuple[int, ...]
    granted_at: float
    renewed_at: float
    orphan: bool = False  # its actor came back without it; kept until that actor's re-sends are in
    seen: bool = False  # a heartbeat of its actor has named it, so it did arrive


class GroupRecord(Struct, array_like=True):
    """A live group. `frames` are accepted GROUP frames in order of arrival; `members` those completed so far.

    `lease` and `first_granted_at` die with the hub, and no record of the log has `num_failures`: verbs change these
    three. The others change by records alone.
    """

    group_id: int
    prompt_index: int
    pass_index: int
    state: GroupState = GroupState.READY
    next_attempt: int = 0
    num_failures: int = 0
    grants: dict[int, Grant] = {}
    members: dict[int, MemberSummary] = {}
    frames: list[bytes] = []
    deliveries: list[Delivery] = []
    holder: str = ""  # the actor that has it on lease; after a restart, that may come back with this lease
    lease: OpenLease | None = None
    first_granted_at: float | None = None
    max_lag: int = 0  # the largest bound in force when one of its leases was granted: what its actors were promised
    sequences: list[int] = []  # of the log's records that hold `frames`

    @property
    def origins(self) -> tuple[GroupOrigin, ...]:
        """The origin of each frame."""
        return tuple(GroupOrigin(one.actor_id, self.prompt_index) for one in self.deliveries)

    def is_with(self, actor_id: str, attempt: int) -> bool:
        """Return whether this actor has the open lease, under this attempt."""
        return self.lease is not None and (self.lease.actor_id, self.lease.attempt) == (actor_id, attempt)

    def was_granted(self, actor_id: str, attempt: int) -> bool:
        """Return whether this attempt, open or not, was this actor's."""
        return attempt in self.grants and self.grants[attempt].actor_id == actor_id


@dataclass(frozen=True, slots=True)
class HeldMember:
    """A trainable trajectory, seen from the version it is judged at."""

    index: int
    num_tokens: int
    num_action_tokens: int  # all of them: a token that is masked for its age stays in the denominator
    reward: float
    scores: dict[str, float]
    head_lag: int  # over the tokens that may be trained, in optimizer steps


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A complete group. Members that are marked aborted inside `frames` do not count; the others occur once each."""

    group_id: int
    version: int
    members: tuple[HeldMember, ...]
    frames: tuple[bytes, ...]
    max_lag: int = 0  # the bound that this group was judged by
    origins: tuple[GroupOrigin, ...] = ()  # of each frame
    sequences: tuple[int, ...] = ()  # of each frame's record in the log

    @property
    def num_tokens(self) -> int:
        return sum(member.num_tokens for member in self.members)


class SettledRow(Struct, array_like=True):
    """The rest of a group that ended, kept until everything before it is in a published checkpoint too."""

    group_id: int
    state: GroupState
    reason: str
    saved: bool = False


class GroupTable:
    """Every group above `done_below`, in dispatch order. All changes of state go through `move` and `settle`."""

    def __init__(self, num_trained: int = 0) -> None:  # before this run's first table, all with numbers below it
        self.live: dict[int, GroupRecord] = {}
        self.settled: dict[int, SettledRow] = {}
        self.next_id = num_trained
        self.done_below = num_trained  # every group with a smaller number has ended, in a published checkpoint
        self.num_trained = num_trained
        self.num_dropped = 0
        self.decisive_versions: dict[int, int] = {}  # of held groups, by `LagBounds`; `move` forgets them
        self._order: list[int] = []  # ids of live groups, ascending
        self._overtakers: set[int] = set()  # trained groups with a larger number than the oldest live one
        self._by_state: dict[GroupState, set[int]] = {state: set() for state in GroupState}

    def add(self, record: GroupRecord) -> None:
        """Add a drawn group; numbers come in ascending order."""
        assert not self._order or record.group_id > self._order[-1], f"group {record.group_id} added out of order"
        self.live[record.group_id] = record
        self._order.append(record.group_id)
        self._by_state[record.state].add(record.group_id)
        self.next_id = max(self.next_id, record.group_id + 1)

    def move(self, record: GroupRecord, state: GroupState) -> None:
        assert state in _LEGAL[record.state], f"group {record.group_id}: {record.state.name} -> {state.name} is illegal"
        self._by_state[record.state].discard(record.group_id)
        self._by_state[state].add(record.group_id)
        self.decisive_versions.pop(record.group_id, None)
        record.state = state

    def settle(self, record: GroupRecord, state: GroupState, reason: str = "") -> None:
        """End a group: TRAINED, or DROPPED with a reason. It leaves the live count at once."""
        self.move(record, state)
        self._by_state[state].discard(record.group_id)
        del self.live[record.group_id]
        del self._order[bisect_left(self._order, record.group_id)]
        self.settled[record.group_id] = SettledRow(record.group_id, state, reason)
        if state is GroupState.TRAINED:
            self.num_trained += 1
            self._overtakers.add(record.group_id)
        else:
            self.num_dropped += 1

    def load(
        self, live: list[GroupRecord], settled: list[SettledRow], *, next_id: int, done_below: int, num_trained: int,
        num_dropped: int,
    ) -> None:
        """Fill a new table from a snapshot, whose rows are in dispatch order."""
        self.done_below, self.num_trained, self.num_dropped = done_below, num_trained, num_dropped
        for record in live:
            # Until the log has told more, the lease of a group that somebody held counts as open.
            if record.holder and record.state is GroupState.READY:
                record.state = GroupState.LEASED
            self.add(record)
        self.next_id = next_id
        self.settled = {row.group_id: row for row in settled}
        self._overtakers = {row.group_id for row in settled if row.state is GroupState.TRAINED}
        self.mark_saved(list(self.settled))

    def mark_saved(self, group_ids: list[int]) -> None:
        """Note that a published checkpoint has these ends."""
        for group_id in group_ids:
            if group_id in self.settled:  # else an earlier checkpoint had it, too
                self.settled[group_id].saved = True
        # Only a run of saved ends at the bottom may go: a number above a live group must stay known as ended.
        while (row := self.settled.get(self.done_below)) is not None and row.saved:
            del self.settled[self.done_below]
            self.done_below += 1

    def num(self, state: GroupState) -> int:
        return len(self._by_state[state])

    def in_state(self, state: GroupState) -> list[GroupRecord]:
        """List live groups in a state, in dispatch order."""
        # A copy, because callers move groups while they go through it.
        return [self.live[group_id] for group_id in sorted(self._by_state[state])]

    def first(self, state: GroupState) -> int | None:
        """The number of the oldest group in a state."""
        return min(self._by_state[state], default=None)

    def in_order(self) -> list[GroupRecord]:
        return [self.live[group_id] for group_id in self._order]

    def rank(self, group_id: int) -> int:
        """Count groups trained, plus live ones dispatched before this number (which need not be drawn yet)."""
        return self.num_trained + bisect_left(self._order, group_id)

    def num_live(self) -> int:
        """Count groups drawn and not dropped, trained ones included: what capacity is compared with."""
        return self.num_trained + len(self.live)

    def num_consumed_after(self, group_id: int) -> int:
        """Count later groups that were trained, or sit in a batch, while this one was still open."""
        # Numbers below the oldest live group can overtake nothing any more: forget them, or the set grows forever.
        oldest = self._order[0] if self._order else self.next_id
        self._overtakers = {other for other in self._overtakers if other > oldest}
        consumed = (*self._by_state[GroupState.IN_BATCH], *self._overtakers)
        return sum(other > group_id for other in consumed)

    def check(self) -> None:
        """Assert that every group drawn is trained, dropped or live, counted from the tables."""
        drawn, live = self.next_id, len(self.live)
        assert drawn == self.num_trained + self.num_dropped + live, (
            f"drawn {drawn} != trained {self.num_trained} + dropped {self.num_dropped} + live {live}"
        )
        known = len(self.live) + len(self.settled)
        assert drawn - self.done_below == known, (
            f"groups {self.done_below} to {drawn - 1} should be in the table, it has {known} of them"
        )
        listed = sum(len(ids) for ids in self._by_state.values())
        assert listed == live == len(self._order), f"{live} live groups, {listed} by state, {len(self._order)} in order"
        leased = GroupState.LEASED  # of tens of thousands of records, several times a second
        torn = next((one for one in self.live.values() if (one.lease is None) is (one.state is leased)), None)
        assert torn is None, f"group {torn.group_id} is {torn.state.name} but its lease is {torn.lease}"
