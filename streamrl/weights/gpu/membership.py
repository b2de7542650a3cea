"""The life of a communicator, as a pure state machine: events and `now` in, effects out.

A communicator has one set of members that never changes, an *epoch*: actors are elastic although a communicator is not.
It brings one version after another for as long as the same actors are there. A member that leaves ends it at once, an
actor that joins makes the next version form another. One version is on its way at a time.

    IDLE      no version is on its way; `members` is empty without a communicator
    LOADING   the broadcaster reads and checks the version           -> SENDING, or NAMING with the members of now
    NAMING    the broadcaster makes the unique id                    -> FORMING
    FORMING   every rank builds the communicator, tests it, reports  -> SENDING
    SENDING   the version is broadcast                               -> IDLE

Any failure ends the epoch, and all actors pull its version. After three failures in a row none is formed any more:
whatever is wrong between these machines will be wrong again, and the other transports bring every version meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from streamrl.messages import BroadcastForm, BroadcastReport, BroadcastSend, BroadcastStage, NcclState, VersionRef

MAX_FAILURES = 3
"""In a row, after which no epoch is formed any more. Fewer would let one bad moment of a network end it for the run."""


class Phase(Enum):
    IDLE = "idle"
    LOADING = "loading"
    NAMING = "naming"
    FORMING = "forming"
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


@dataclass(frozen=True, slots=True)
class TurnOff:
    """No epoch is formed any more in this run."""

    reason: str


Effect = BroadcastForm | Invite | BroadcastSend | Abort | Pull | TurnOff
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
        self.phase, self.off = Phase.IDLE, False
        self.epoch = 0
        self.members: dict[str, int] = {}  # member -> ranks it contributes, in rank order
        self.num_formed = self.num_broadcasts = self.num_given_up = 0
        self._candidates: dict[str, int] = {}
        self._up = self._broadcaster_formed = False
        self._unique_id = b""
        self._loaded: VersionRef | None = None  # the last one that the broadcaster has read
        self._joined: set[str] = set()
        self._formed: set[str] = set()
        self._ref: VersionRef | None = None  # in work
        self._next: VersionRef | None = None  # published while `_ref` was on its way
        self._failures = 0  # since a broadcast of which no member complained
        self._deadline = 0.0
        self._effects: list[Effect] = []

    # --- events -------------------------------------------------------------------------------------------------

    def set_candidates(self, candidates: Mapping[str, int], now: float) -> list[Effect]:
        """The actors that could take part now, with their number of ranks. A member missing here has left."""
        gone = [member for member, ranks in self.members.items() if candidates.get(member) != ranks]
        self._candidates = dict(candidates)
        # A rank that has left keeps the others waiting: the epoch ends at once, not at its deadline. It says nothing
        # about the network: actors come and go.
        if gone:
            self._fail(f"{', '.join(gone)} left", counts=False)
        return self._take()

    def broadcaster_up(self) -> None:
        """A (new) broadcaster process is ready."""
        self._up = True

    def broadcaster_down(self) -> list[Effect]:
        """The broadcaster is gone, and its communicator with it."""
        self._up, self._loaded = False, None
        self._fail("the broadcaster ended", counts=self.phase not in (Phase.IDLE, Phase.LOADING))
        return self._take()

    def published(self, ref: VersionRef, now: float) -> list[Effect]:
        """A new version: every candidate gets an Invite or a Pull for it, or is expected to get one soon."""
        if self.phase is Phase.IDLE:
            self._ref = ref
            self._begin(now)
        elif self.phase is Phase.LOADING:
            # A learner that publishes faster than a document is read: actors must not wait for a broadcast forever.
            self._ref = ref
            self._give_up()
        else:
            # Actors outside the epoch do not wait for it.
            self._pull(self._candidates.keys() - self.members.keys(), ref)
            if self.phase is Phase.NAMING:
                self._ref = ref  # no member was told of the one before
            else:
                self._next = ref
        return self._take()

    def broadcaster_said(self, report: BroadcastReport, now: float) -> list[Effect]:
        """A report of the broadcaster; those on other epochs change nothing."""
        current = report.epoch == self.epoch
        match report.stage, self.phase:
            case BroadcastStage.LOADED, _:
                self._loaded = None if report.error else report.ref
                if report.error:
                    self._not_loaded(report)
                elif self.phase is Phase.LOADING and report.ref == self._ref:
                    self._begin(now)
            case BroadcastStage.NAMED, Phase.NAMING if current:
                self.phase, self._deadline, self._unique_id = Phase.FORMING, now + self._init_s, report.unique_id
                self._invite()
            case BroadcastStage.FORMED, Phase.FORMING if current:
                self._broadcaster_formed = True
                self._send_if_formed(now)
            case BroadcastStage.PROGRESS, Phase.SENDING if current:
                self._deadline = now + self._bucket_s + self._grace_s
            case BroadcastStage.SENT, Phase.SENDING if current:
                self._sent(now)
            case BroadcastStage.FAILED, (Phase.NAMING | Phase.FORMING | Phase.SENDING) if current:
                self._fail(report.error, hung=False)
        return self._take()

    def member_said(self, member: str, state: NcclState, now: float) -> list[Effect]:
        """The state of a member's communicator, from its heartbeat."""
        if member in self.members:
            # No rank finishes before all have begun, so `joining` alone tells for which member the others wait.
            if self.epoch in (state.joining, state.formed):
                self._joined.add(member)
            if state.formed == self.epoch and self.phase is Phase.FORMING:
                self._formed.add(member)
                self._send_if_formed(now)
            if state.failed == self.epoch:
                self._fail(f"{member} reported a failure")
        return self._take()

    def tick(self, now: float) -> list[Effect]:
        """Let time pass."""
        if self.phase is not Phase.IDLE and now >= self._deadline:
            self._expire()
        return self._take()

    def expects(self, member: str, ref: VersionRef) -> bool:
        """Whether a broadcast of this version to the member is in progress: it needs no other offer yet."""
        group = self._candidates if self.phase is Phase.LOADING else self.members
        return self.phase is not Phase.IDLE and member in group and ref in (self._ref, self._next)

    # --- inside -------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Send `_ref` by the present epoch or form another for it, once the broadcaster has it; else have it pulled."""
        assert self._ref is not None
        if self.off or not self._up or not self._candidates:
            self._give_up()
        elif self._loaded != self._ref:
            # A member that is invited waits inside a kernel, on a GPU that its engine computes on: not before this.
            self.phase, self._deadline = Phase.LOADING, now + self._init_s + self._bucket_s
        else:
            if self.members:
                # Not at SENT: a member that received damaged bytes reports them after the broadcaster has said SENT.
                self._failures = 0
            if self.members == self._candidates:
                self._invite()
                self._send(now)
            else:
                self._form(now)

    def _not_loaded(self, report: BroadcastReport) -> None:
        if report.ref is not None and report.ref == self._next:
            self._next = None
            self._pull(self.members, report.ref)
        elif report.ref == self._ref and self.phase is Phase.LOADING:
            self._give_up()
        elif report.ref == self._ref:
            self._fail(report.error, hung=False, counts=False)

    def _form(self, now: float) -> None:
        """Begin an epoch; the broadcaster and the members leave the one before, if there is one, when they join it."""
        self.epoch += 1
        # Sorted, so that ranks depend on the names alone, not on the order in which actors came.
        self.members = dict(sorted(self._candidates.items()))
        self._joined, self._formed, self._broadcaster_formed = set(), set(), False
        self.phase, self._deadline = Phase.NAMING, now + self._init_s
        self._effects.append(BroadcastForm(self.epoch, 1 + sum(self.members.values())))

    def _invite(self) -> None:
        assert self._ref is not None
        first_rank, rank = {}, 1
        for member, num_ranks in self.members.items():
            first_rank[member] = rank
            rank += num_ranks
        self._effects.append(Invite(self.epoch, self._ref, self._unique_id, rank, first_rank))

    def _send_if_formed(self, now: float) -> None:
        if self._broadcaster_formed and self._formed == self.members.keys():
            self.num_formed += 1
            self._send(now)

    def _send(self, now: float) -> None:
        assert self._ref is not None
        # The first bucket's deadline includes the time to form, as the members count it too.
        self.phase, self._deadline = Phase.SENDING, now + self._init_s + self._bucket_s + self._grace_s
        self._effects.append(BroadcastSend(self.epoch, self._ref))

    def _sent(self, now: float) -> None:
        self.num_broadcasts += 1
        self.phase, self._ref, self._next = Phase.IDLE, self._next, None
        if self._ref is not None:
            self._begin(now)

    def _expire(self) -> None:
        if self.phase is Phase.LOADING:
            self._give_up()
        elif self.phase is Phase.FORMING:
            missing = ", ".join(sorted(self.members.keys() - self._joined))
            who = f"without {missing}" if missing else "although all members came"
            self._fail(f"not formed in {self._init_s:g} s {who}")
        else:
            what = "gave no unique id" if self.phase is Phase.NAMING else "sent nothing more"
            self._fail(f"the broadcaster {what} in time", hung=True)

    def _fail(self, reason: str, *, hung: bool | None = None, counts: bool = True) -> None:
        """End the epoch and have the version on its way pulled."""
        if self._up and self.members:
            # In FORMING the broadcaster is inside a call that waits for every member, with no handle to abort it.
            stuck = self.phase is Phase.FORMING and not self._broadcaster_formed
            hung = stuck if hung is None else hung
            self._effects.append(Abort(self.epoch, reason, hung))
            # A terminated process answers no more; its successor reports when it is ready.
            self._up = not hung
        self.members = {}
        self._failures += counts
        if self._failures >= MAX_FAILURES and not self.off:
            self.off = True
            self._effects.append(TurnOff(reason))
        self._give_up()

    def _give_up(self) -> None:
        """Have all actors pull the newest version, if one is on its way."""
        newest, self._ref, self._next = self._next or self._ref, None, None
        self.phase = Phase.IDLE
        if newest is not None:
            self.num_given_up += bool(self._candidates)
            self._pull(self._candidates, newest)

    def _pull(self, members: Iterable[str], ref: VersionRef) -> None:
        if names := tuple(sorted(members)):
            self._effects.append(Pull(ref, names))

    def _take(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
