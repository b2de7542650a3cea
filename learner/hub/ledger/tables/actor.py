"""One linked actor, and the order of those with room for training leases, which needs no pass over all of them.

They are kept by installed version, because the lag rule admits whole versions, and among those by (leases held, last
grant, name). So the fair share is a sum over a few versions, and the actor that is next stands first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from learner.hub.ledger.tables.groups import OpenLease
from streamrl.messages import EVAL_BIT, LeaseRef, VersionRef

MAX_LEASES = 1024  # of one purpose at one actor, whatever it claims: as many as a HELLO can list

Place = tuple[int, int, str]
"""(leases held, number of the last grant, actor_id)."""


@dataclass(slots=True)
class Credit:
    """Leases of one purpose at one actor. `limit` is the most that it may hold, `free` what it could take now, `trust`
    the most that it gets: one for a new name beside others that have delivered and after a lease of it has expired,
    none after it let others wait for its first group, twice as many with each group that it delivers."""

    limit: int = 0
    free: int = 0
    trust: int = MAX_LEASES
    leases: dict[int, OpenLease] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return max(0, min(self.free, min(self.limit, self.trust) - len(self.leases)))

    def delivered(self) -> None:
        self.trust = min(max(1, 2 * self.trust), MAX_LEASES)


@dataclass(slots=True)
class Actor:
    """A linked actor, as far as leases go. `state` is JOINING (nothing useful installed), READY or LEAVING."""

    actor_id: str
    incarnation: int
    heard_at: float
    survived_restart: bool  # it was in the run before this learner started, so it may hold leases that no table knows
    proven: bool = False  # it has delivered, under this name or before the restart
    state: str = "JOINING"
    installed: VersionRef | None = None
    train: Credit = field(default_factory=Credit)
    eval: Credit = field(default_factory=Credit)
    revocations: list[LeaseRef] = field(default_factory=list)
    resend_upto: int = 0  # orphaned leases wait until its numbers up to here have been answered
    granted_no: int = 0  # when it last got a lease, for round robin
    moved_at: float = 0.0  # when it last showed progress: tokens, answers of environments, a group
    progress: tuple[float, ...] = ()  # the counters of its last heartbeat

    def record_progress(self, progress: tuple[float, ...], now: float) -> None:
        """Note the heartbeat's counters; any change counts as progress, also to the zeros of a new process."""
        if progress != self.progress:
            self.progress, self.moved_at = progress, now

    @property
    def num_train(self) -> int:
        return len(self.train.leases)

    @property
    def wants_train(self) -> bool:
        return self.state == "READY" and self.train.room > 0

    def credit(self, group_id: int) -> Credit:
        return self.eval if group_id & EVAL_BIT else self.train

    def open_leases(self) -> list[tuple[int, OpenLease]]:
        """List (group_id, lease) of everything this actor holds, in dispatch order, evaluation last."""
        return sorted(self.train.leases.items()) + sorted(self.eval.leases.items())

    def end_lease(self, group_id: int, *, revoke: bool) -> None:
        credit = self.credit(group_id)
        lease = credit.leases.pop(group_id)
        if revoke:
            self.revocations.append((group_id, lease.attempt))  # it stays busy until the actor has read this
        else:
            credit.free += 1  # free at once; the next heartbeat reports it up to a second later

    def install(self, ref: VersionRef | None) -> None:
        """Note the usable weights it generates from; with none it gets no leases."""
        self.installed = ref
        if self.state != "LEAVING":
            self.state = "READY" if ref is not None else "JOINING"


class LeaseShares:
    """The order of actors. Call `touch` after any change of one; places are brought up to date when asked for."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, Place]] = {}
        self._by_version: dict[int, list[Place]] = {}
        self._num_held: dict[int, int] = {}
        self._touched: dict[str, Actor] = {}

    def touch(self, actor: Actor) -> None:
        self._touched[actor.actor_id] = actor

    def remove(self, actor_id: str) -> None:
        self._touched.pop(actor_id, None)
        self._take_out(actor_id)

    def totals(self, admits: Callable[[int], bool]) -> tuple[int, int]:
        """Count (actors with room, leases that they hold) over the installed versions that `admits`."""
        versions = self._admitted(admits)
        return sum(len(self._by_version[one]) for one in versions), sum(self._num_held[one] for one in versions)

    def first(self, num: int, admits: Callable[[int], bool]) -> list[str]:
        """List so many actors: those that hold least first, of these the one that waited longest."""
        places = heapq.merge(*(self._by_version[one] for one in self._admitted(admits)))
        return [actor_id for _, _, actor_id in islice(places, num)]

    def _admitted(self, admits: Callable[[int], bool]) -> list[int]:
        for actor in self._touched.values():
            self._take_out(actor.actor_id)
            self._put_in(actor)
        self._touched.clear()
        return [version for version in self._by_version if admits(version)]

    def _put_in(self, actor: Actor) -> None:
        if not actor.wants_train or actor.installed is None:
            return
        version, place = actor.installed.version, (actor.num_train, actor.granted_no, actor.actor_id)
        self._places[actor.actor_id] = (version, place)
        insort(self._by_version.setdefault(version, []), place)
        self._num_held[version] = self._num_held.get(version, 0) + place[0]

    def _take_out(self, actor_id: str) -> None:
        version, place = self._places.pop(actor_id, (-1, (0, 0, "")))
        if version < 0:
            return
        places = self._by_version[version]
        del places[bisect_left(places, place)]
        self._num_held[version] -= place[0]
        if not places:
            del self._by_version[version], self._num_held[version]

    def check(self, actors: Iterable[Actor]) -> None:
        """Assert that the order is what a pass over all actors gives."""
        self._admitted(lambda version: True)
        found = {
            one.actor_id: (one.installed.version, (one.num_train, one.granted_no, one.actor_id))
            for one in actors if one.wants_train and one.installed is not None
        }
        assert found == self._places, f"shares of {sorted(found.items() ^ self._places.items())[:3]} are out of date"
