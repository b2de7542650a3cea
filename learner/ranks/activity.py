"""A learner rank's present activity: written by its training thread, read by the thread that sends heartbeats."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Doing(NamedTuple):
    """A name, and since when, in monotonic seconds; the empty name is nothing."""

    name: str
    since: float


class Activity:
    """The phase of the step, and the collective operation inside it. Each write replaces one reference: no lock."""

    def __init__(self) -> None:
        self.phase = Doing("set-up", time.monotonic())
        self.collective = Doing("", 0.0)
        self.num_collectives = 0

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Inside, this rank is in that phase; an inner phase replaces an outer one until its end."""
        outer, self.phase = self.phase, Doing(name, time.monotonic())
        yield
        self.phase = outer  # not after an error: the phase that failed is what a report must name

    @contextmanager
    def in_collective(self, name: str) -> Iterator[None]:
        """Inside, this rank may wait for the others."""
        self.num_collectives += 1
        self.collective = Doing(name, time.monotonic())
        yield
        self.collective = Doing("", 0.0)
