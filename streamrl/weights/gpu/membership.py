"""Membership epochs of a communicator, as a pure state machine: events and `now` in, effects out.

A communicator has one frozen set of members. A joining actor waits for the next epoch, a leaving one ends the present
one: actors are elastic although a communicator is not. One broadcast is in progress at a time.

    IDLE      no communicator
    NAMING    members are frozen, the broadcaster makes the unique id        -> FORMING
    FORMING   every rank builds the communicator, tests it and reports       -> LIVE
    LIVE      formed and idle; reused while the members are the same         -> SENDING
    SENDING   a version is broadcast                                         -> LIVE

Any failure ends the epoch: the phase is IDLE again, its communicator is never used again, and all actors pull the
version that it was to bring. The next publish forms an epoch without the members that failed. After three failures in a
row none is formed for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from streamrl.messages import BroadcastForm, BroadcastSend, VersionRef

MAX_FAILURES = 2
"""In a row, after which the next publish may still form an epoch."""
JOIN_INTERVAL_S = 30.0
"""Joins alone end a healthy epoch at most this often; as long a member is excluded that did not form a communicator or
received wrong bytes, and as long no epoch is formed after too many failures."""


class Phase(Enum):
    IDLE = "idle"
    NAMING = "naming"
    FORMING = "forming"
    LIVE = "live"
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Invite:
    """Message to each member: version `ref` will come by this epoch. `first_rank` by member."""

    epoch: int
    ref: VersionRef
    unique_id: bytes
    world: int
    first_rank: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Abort:
    """Message to the broadcaster: this epoch is over. `hung`: it is in a call without an abort, so end the process."""

    epoch: int
    reason: str
    hung: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Message to these actors: version `ref` does not come by broadcast, use another transport."""

    ref: VersionRef
    members: tuple[str, ...]


Effect = BroadcastForm | Invite | BroadcastSend | Abort | Pull
"""The messages among them go to the broadcaster as they are."""


class Membership:
    """The epochs of one broadcaster.

    Args:
        init_deadline_s: for naming, and again for building and testing a communicator.
        bucket_deadline_s: between two signs of progress of a broadcast; what members keep to as well.
        grace_s: how much later than the members this side gives up, so that their reports arrive first.
    """

    def __init__(self, *, init_deadline_s: float = 20.0, bucket_deadline_s: float = 10.0, grace_s: float = 5.0) -> None:
        self._init_s, self._bucket_s, self._grace_s = init_deadline_s, bucket_deadline_s, grace_s
        self.phase = Phase.IDLE
        self.epoch = 0
        self.members: dict[str, int] = {}  # member -> ranks it contributes, in rank order
        self.num_formed = self.num_broadcasts = self.num_given_up = 0
        self._candidates: dict[str, int] = {}
        self._barred: dict[str, float] = {}  # member -> when it may join again
        self._broadcaster_up = self._broadcaster_formed = False
        self._unique_id = b""
        self._joined: set[str] = set()
        self._reported: set[str] = set()
        self._ref: VersionRef | None = None  # in work
        self._next: VersionRef | None = None  # published while `_ref` was being sent
        self._failures = 0  # since the last complete broadcast
        self._deadline = 0.0
        self._formed_at = self._not_before = float("-inf")
        self._effects: list[Effect] = []

    # --- events -------------------------------------------------------------------------------------------------

    def set_candidates(self, candidates: Mapping[str, int], now: float) -> list[Effect]:
        """The actors that could join now, with their number of ranks. A member missing here has left."""
        self._barred = {m: until for m, until in self._barred.items() if now < until}
        gone = [m for m, ranks in self.members.items() if candidates.get(m) != ranks]
        self._candidates = {m: ranks for m, ranks in candidates.items() if m not in self._barred}
        # A rank that has left keeps the others waiting: the epoch ends at once, not at its deadline.
        if gone and self.phase is not Phase.IDLE:
            self._fail(f"{', '.join(gone)} left", now)
        return self._take()

    def broadcaster_up(self) -> None:
        """A (new) broadcaster process is ready."""
        self._broadcaster_up = True

    def broadcaster_down(self, now: float) -> list[Effect]:
        """The broadcaster is gone, and its communicator with it."""
        self._broadcaster_up = False
        if self.phase is not Phase.IDLE:
            self._fail("the broadcaster ended", now)
        return self._take()

    def published(self, ref: VersionRef, now: float) -> list[Effect]:
        """A new version: every candidate gets an Invite or a Pull for it, or is expected to get one soon."""
        if self._ref is None:
            self._ref = ref
            self._begin(now)
            return self._take()
        # Actors outside the present epoch do not wait for it.
        self._pull(self._candidates.keys() - self.members.keys(), ref)
        if self.phase is Phase.SENDING:
            # A broadcast in progress is finished first: ending it would end the epoch.
            self._next = ref
        else:  # the epoch being formed was for a version that is obsolete now: it brings this one
            self._ref = ref
            if self.phase is Phase.FORMING:
                self._invite()
        return self._take()

    def named(self, epoch: int, unique_id: bytes, now: float) -> list[Effect]:
        """The broadcaster's unique id."""
        if (epoch, self.phase) == (self.epoch, Phase.NAMING):
            self._unique_id, self.phase, self._deadline = unique_id, Phase.FORMING, now + self._init_s
            self._invite()
        return self._take()

    def joined(self, member: str, epoch: int, now: float) -> list[Effect]:
        """A member has begun to build the communicator. No rank finishes before all have begun, so this alone
        tells which member the others wait for."""
        if (epoch, self.phase) == (self.epoch, Phase.FORMING) and member in self.members:
            self._joined.add(member)
        return self._take()

    def formed(self, member: str | None, epoch: int, now: float) -> list[Effect]:
        """A member (None: the broadcaster) has built and tested the communicator."""
        if (epoch, self.phase) == (self.epoch, Phase.FORMING):
            if member is None:
                self._broadcaster_formed = True
            elif member in self.members:
                self._reported.add(member)
            if self._broadcaster_formed and self._reported == self.members.keys():
                self.phase, self._formed_at = Phase.LIVE, now
                self.num_formed += 1
                self._send(now)
        return self._take()

    def progressed(self, epoch: int, now: float) -> list[Effect]:
        """The broadcaster has sent another bucket."""
        if (epoch, self.phase) == (self.epoch, Phase.SENDING):
            self._deadline = now + self._bucket_s + self._grace_s
        return self._take()

    def sent(self, epoch: int, now: float) -> list[Effect]:
        """The broadcast is complete at the broadcaster."""
        if (epoch, self.phase) == (self.epoch, Phase.SENDING):
            self.phase, self._ref, self._failures = Phase.LIVE, None, 0
            self.num_broadcasts += 1
            if self._next is not None:
                self._ref, self._next = self._next, None
                self._begin(now)
        return self._take()

    def failed(self, member: str | None, epoch: int, reason: str, now: float) -> list[Effect]:
        """A member (None: the broadcaster) reports that this epoch's communicator failed or brought wrong bytes."""
        if epoch == self.epoch and self.phase is not Phase.IDLE:
            excluded = self._bar([member], now) if member is not None else []
            self._fail(reason, now, hung=False if member is None else None, excluded=excluded)
        return self._take()

    def tick(self, now: float) -> list[Effect]:
        """Let time pass."""
        if self.phase not in (Phase.IDLE, Phase.LIVE) and now >= self._deadline:
            self._expire(now)
        return self._take()

    def expects(self, member: str, ref: VersionRef) -> bool:
        """Whether a broadcast of this version to the member is in progress: it needs no other offer yet."""
        return self.phase is not Phase.IDLE and member in self.members and ref in (self._ref, self._next)

    # --- inside -------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Send `_ref` by the present epoch, or form a new one, or have it pulled."""
        joins = self._candidates.keys() - self.members.keys()
        # A healthy epoch is kept for a while although actors wait to join: forming costs all members time.
        if self.phase is Phase.LIVE and (not joins or now < self._formed_at + JOIN_INTERVAL_S):
            self._pull(joins)
            self._invite()
            self._send(now)
            return
        if self.phase is Phase.LIVE:
            self._end(f"{', '.join(sorted(joins))} joined", hung=False)
        if now < self._not_before or not self._broadcaster_up or not self._candidates:
            self._give_up()
            return
        self.epoch += 1
        # Sorted, so that ranks depend on the names alone, not on the order in which actors came.
        self.members = dict(sorted(self._candidates.items()))
        self.phase, self._deadline = Phase.NAMING, now + self._init_s
        self._broadcaster_formed, self._unique_id = False, b""
        self._reported, self._joined = set(), set()
        self._effects.append(BroadcastForm(self.epoch, 1 + sum(self.members.values())))

    def _invite(self) -> None:
        assert self._ref is not None
        first_rank, rank = {}, 1
        for member, num_ranks in self.members.items():
            first_rank[member] = rank
            rank += num_ranks
        self._effects.append(Invite(self.epoch, self._ref, self._unique_id, rank, first_rank))

    def _send(self, now: float) -> None:
        assert self._ref is not None
        # The first bucket's deadline includes the time to form, as the members count it too.
        self.phase, self._deadline = Phase.SENDING, now + self._init_s + self._bucket_s + self._grace_s
        self._effects.append(BroadcastSend(self.epoch, self._ref))

    def _expire(self, now: float) -> None:
        if self.phase is Phase.FORMING:
            # Only members that never began are excluded: those that did wait for them inside the call.
            missing = self._bar(sorted(self.members.keys() - self._reported - self._joined), now)
            who = f"without {', '.join(missing)}" if missing else "although all members came"
            self._fail(f"not formed in {self._init_s:g} s {who}", now, excluded=missing)
        else:
            what = "gave no unique id" if self.phase is Phase.NAMING else "sent nothing more"
            self._fail(f"the broadcaster {what} in time", now, hung=True)

    def _bar(self, members: list[str], now: float) -> list[str]:
        for member in members:
            self._barred[member] = now + JOIN_INTERVAL_S
            self._candidates.pop(member, None)
        return members

    def _fail(self, reason: str, now: float, *, hung: bool | None = None, excluded: Sequence[str] = ()) -> None:
        """End the present epoch and have its version pulled, by the members that it excludes too."""
        # In FORMING the broadcaster is inside a call that waits for every member, with no handle to abort it.
        stuck = self.phase is Phase.FORMING and not self._broadcaster_formed
        self._end(reason, hung=stuck if hung is None else hung)
        if self._ref is not None:
            self._failures += 1
            if self._failures > MAX_FAILURES:
                self._not_before = now + JOIN_INTERVAL_S
            self._ref, self._next = self._next or self._ref, None
            self._pull(excluded)
            self._give_up()

    def _end(self, reason: str, *, hung: bool) -> None:
        if self._broadcaster_up:
            self._effects.append(Abort(self.epoch, reason, hung))
            # A terminated process answers no more; its successor reports when it is ready.
            self._broadcaster_up = not hung
        self.phase, self.members = Phase.IDLE, {}

    def _give_up(self) -> None:
        """Have all actors pull `_ref`."""
        self.num_given_up += bool(self._candidates)
        self._pull(self._candidates)
        self._ref = None

    def _pull(self, members: Iterable[str], ref: VersionRef | None = None) -> None:
        names, ref = tuple(sorted(members)), ref or self._ref
        if names and ref is not None:
            self._effects.append(Pull(ref, names))

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
