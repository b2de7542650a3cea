"""Actors with room for training leases, in an order that needs no pass over all of them.

They are kept by installed version, because the lag rule admits whole versions, and among those by (leases held, last
grant, name). So the fair share is a sum over a few versions, and the actor that is next stands first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from streamrl.messages import VersionRef

Place = tuple[int, int, str]
"""(leases held, number of the last grant, actor_id)."""


class Sharer(Protocol):
    """The facts of an actor that decide its place."""

    actor_id: str
    installed: VersionRef | None
    granted_no: int

    @property
    def num_train(self) -> int: ...

    @property
    def wants_train(self) -> bool: ...


class LeaseShares:
    """The order of actors. Call `touch` after any change of one; places are brought up to date when asked for."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, Place]] = {}
        self._by_version: dict[int, list[Place]] = {}
        self._num_held: dict[int, int] = {}
        self._touched: dict[str, Sharer] = {}

    def touch(self, actor: Sharer) -> None:
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

    def _put_in(self, actor: Sharer) -> None:
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

    def check(self, actors: Iterable[Sharer]) -> None:
        """Assert that the order is what a pass over all actors gives."""
        self._admitted(lambda version: True)
        found = {
            one.actor_id: (one.installed.version, (one.num_train, one.granted_no, one.actor_id))
            for one in actors if one.wants_train and one.installed is not None
        }
        assert found == self._places, f"shares of {sorted(found.items() ^ self._places.items())[:3]} are out of date"
