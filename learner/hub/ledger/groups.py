"""A group's life in the ledger: its states, what is known of it, and the table that keeps dispatch order.

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

from streamrl.messages import MemberStatus
from streamrl.messages.validate import MemberSummary


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
    """Where accepted bytes came from; the key that an ack names."""

    actor_id: str
    incarnation: int
    seq: int


class Grant(Struct, array_like=True, frozen=True):
    """Who was given an attempt, and which members."""

    actor_id: str
    members: tuple[int, ...]


class OpenLease(Struct):
    """The lease that is out now. Times are the caller's monotonic seconds."""

    attempt: int
    actor_id: str
    members: tuple[int, ...]
    granted_at: float
    renewed_at: float
    orphan: bool = False
    """Its actor came back without it; kept until that actor's re-sends are in."""
    seen: bool = False
    """A heartbeat of its actor has named it, so it did arrive."""


class GroupRecord(Struct, array_like=True):
    """A live group. `frames` are accepted GROUP frames in order of arrival; `members` those completed so far."""

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
    holder: str = ""
    """After a restart: the actor that had this lease, which has a moment to come back with it."""
    lease: OpenLease | None = None
    first_granted_at: float | None = None
    max_lag: int = 0
    """The largest bound that was in force when one of its leases was granted: what its actors were promised."""


@dataclass(frozen=True, slots=True)
class HeldMember:
    """A trainable trajectory, seen from the version it is judged at.

    `head_lag` is over the tokens that may be trained, in optimizer steps; `num_action_tokens` counts all, because a
    token that is masked for its age stays in the denominator.
    """

    index: int
    num_tokens: int
    num_action_tokens: int
    reward: float
    scores: dict[str, float]
    truncated: bool
    head_lag: int


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A complete group. Members that are marked aborted inside `frames` do not count; the others occur once each."""

    group_id: int
    prompt_index: int
    pass_index: int
    version: int
    members: tuple[HeldMember, ...]
    frames: tuple[bytes, ...]
    max_lag: int = 0
    """The bound that this group was judged by."""

    @property
    def num_tokens(self) -> int:
        return sum(member.num_tokens for member in self.members)


@dataclass(frozen=True, slots=True)
class LagRule:
    """L2, the hard check on age, against the bound that a group goes by."""

    mask_old_tokens: bool

    def trainable(self, facts: MemberSummary, version: int, max_lag: int) -> list[int]:
        """Versions whose tokens may be trained at this version."""
        oldest = version - max_lag if self.mask_old_tokens else -1
        return [span.version for span in facts.spans if span.version >= oldest]

    def is_stale(self, facts: MemberSummary, version: int, max_lag: int) -> bool:
        """A token is too old to train; with masking, every token is."""
        spans = self.trainable(facts, version, max_lag)
        return not spans or version - min(spans) > max_lag

    def held(self, record: GroupRecord, version: int, max_lag: int) -> HeldGroup:
        """The group as it would be trained at this version."""
        members = tuple(self._member(record.members[index], version, max_lag) for index in sorted(record.members))
        return HeldGroup(
            record.group_id, record.prompt_index, record.pass_index, version, members, tuple(record.frames), max_lag
        )

    def _member(self, facts: MemberSummary, version: int, max_lag: int) -> HeldMember:
        return HeldMember(
            index=facts.index, num_tokens=facts.num_tokens, num_action_tokens=facts.num_action_tokens,
            reward=facts.reward, scores=facts.scores, truncated=facts.status == MemberStatus.TRUNCATED,
            head_lag=max((version - span for span in self.trainable(facts, version, max_lag)), default=0),
        )


class SettledRow(Struct, array_like=True):
    """What remains of a group that ended, until everything before it is in a published checkpoint too."""

    group_id: int
    state: GroupState
    reason: str
    saved: bool = False


class GroupTable:
    """Every group above `done_below`, in dispatch order. All changes of state go through `move` and `settle`."""

    def __init__(self) -> None:
        self.live: dict[int, GroupRecord] = {}
        self.settled: dict[int, SettledRow] = {}
        self.next_id = 0
        self.done_below = 0  # every group with a smaller number has ended, in a published checkpoint
        self.num_trained = 0
        self.num_dropped = 0
        self._order: list[int] = []  # ids of live groups, ascending
        self._overtakers: set[int] = set()  # trained groups with a larger number than the oldest live one
        self._by_state: dict[GroupState, set[int]] = {state: set() for state in GroupState}

    def add(self, record: GroupRecord) -> None:
        """A drawn group; numbers come in ascending order."""
        assert not self._order or record.group_id > self._order[-1], f"group {record.group_id} added out of order"
        self.live[record.group_id] = record
        self._order.append(record.group_id)
        self._by_state[record.state].add(record.group_id)
        self.next_id = max(self.next_id, record.group_id + 1)

    def move(self, record: GroupRecord, state: GroupState) -> None:
        assert state in _LEGAL[record.state], f"group {record.group_id}: {record.state.name} -> {state.name} is illegal"
        self._by_state[record.state].discard(record.group_id)
        self._by_state[state].add(record.group_id)
        record.state = state

    def settle(self, record: GroupRecord, state: GroupState, reason: str = "") -> None:
        """The end of a group: TRAINED, or DROPPED with a reason. It leaves the live count at once."""
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

    def load(self, live: list[GroupRecord], settled: list[SettledRow]) -> None:
        """Fill an empty table from a snapshot, whose rows are in dispatch order."""
        for record in live:
            self.add(record)
        self.settled = {row.group_id: row for row in settled}
        self._overtakers = {row.group_id for row in settled if row.state is GroupState.TRAINED}
        self.mark_saved(list(self.settled))

    def mark_saved(self, group_ids: list[int]) -> None:
        """A published checkpoint has these ends."""
        for group_id in group_ids:
            self.settled[group_id].saved = True
        while (row := self.settled.get(self.done_below)) is not None and row.saved:
            del self.settled[self.done_below]
            self.done_below += 1

    def num(self, state: GroupState) -> int:
        return len(self._by_state[state])

    def ids(self, state: GroupState) -> list[int]:
        """Live groups in a state, in dispatch order."""
        return sorted(self._by_state[state])

    def in_order(self) -> list[GroupRecord]:
        return [self.live[group_id] for group_id in self._order]

    def rank(self, group_id: int) -> int:
        """Groups trained, plus live ones dispatched before this number (which need not be drawn yet)."""
        return self.num_trained + bisect_left(self._order, group_id)

    def num_live(self) -> int:
        """Groups drawn and not dropped, trained ones included: what capacity is compared with."""
        return self.num_trained + len(self.live)

    def num_consumed_after(self, group_id: int) -> int:
        """Later groups that were trained, or sit in a batch, while this one was still open."""
        oldest = self._order[0] if self._order else self.next_id
        self._overtakers = {other for other in self._overtakers if other > oldest}
        consumed = (*self._by_state[GroupState.IN_BATCH], *self._overtakers)
        return sum(other > group_id for other in consumed)

    def check(self) -> None:
        """Every group drawn is trained, dropped or live; counted afresh."""
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
        for record in self.live.values():
            leased = record.lease is not None
            assert leased == (record.state is GroupState.LEASED), (
                f"group {record.group_id} is {record.state.name} but its lease is {record.lease}"
            )
