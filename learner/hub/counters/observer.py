"""Observers: objects that take note of what actors do, for metrics and warnings; none of them decides anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.messages import Group, Hello


@dataclass(frozen=True, slots=True)
class Arrival:
    """A group that the ledger has accepted, or refused for its age alone: well-formed, and no repetition."""

    actor_id: str
    group: Group
    num_bytes: int = 0
    """Size of the message on the wire."""
    accepted: bool = True
    num_open: int = 0
    """Groups that actors work on now."""


class Observer:
    """Base of observers: an event that a class does not need is ignored.

    Attributes:
        fatal: why the run must stop; "" while it need not.
    """

    fatal: str = ""

    def joined(self, hello: Hello, *, is_new: bool) -> None:
        """An actor was let in; `is_new` tells a new process from one that was here before."""

    def group(self, arrival: Arrival) -> None:
        """A group has arrived."""

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        """An actor has sent the numbers of a heartbeat."""

    def remove(self, actor_id: str) -> None:
        """An actor has left or was evicted."""

    def metrics(self) -> dict[str, float]:
        """Report counters for the learner's metrics."""
        return {}
