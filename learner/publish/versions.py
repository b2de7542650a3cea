"""The schedule of versions that actors get."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from learner.publish.probe import Prober
from learner.publish.publishing import Publishing
from learner.ranks.clock import StepClock
from streamrl.messages import VersionRef


class PublishRule(Protocol):
    """Decides which versions are worth a publication."""

    def publish_due(self, version: int, *, asked_for: bool = False) -> bool: ...

    def published(self, version: int) -> None: ...


class Versions:
    """One learner rank's part in the publication of versions; every call is collective, but for `poll`.

    Args:
        wire_precision: the policy as actors have it, for a probe.
        staged: called with each version whose weights are published as they are at that moment.
    """

    def __init__(
        self, publishing: Publishing, rule: PublishRule, clock: StepClock, prober: Prober | None, *,
        learner_epoch: int, wire_precision: Callable[[], AbstractContextManager[None]], staged: Callable[[int], None],
    ) -> None:
        self.publishing, self._rule, self._clock, self._prober = publishing, rule, clock, prober
        self._learner_epoch, self._wire_precision, self._staged = learner_epoch, wire_precision, staged

    def publish_if_due(self, version: int, *, asked_for: bool) -> None:
        """Publish, unless actors have this version or do as well with the one they have.

        The version before is announced first, also where none is due: the ledger takes them in order.
        """
        with self._clock.timed("publish"):
            self.settle()
        if self._rule.publish_due(version, asked_for=asked_for):
            self.publish(version)

    def publish(self, version: int) -> None:
        """Make the current weights available to every actor under this version.

        It may return while they are being written: `settle` waits for that.
        """
        with self._clock.timed("publish"):
            self.settle()
            probe = None
            if self._prober is not None and self._prober.due(version):
                with self._wire_precision():
                    probe = self._prober.probe_if_due(version)
            self._staged(version)
            self.publishing.stage(VersionRef(self._learner_epoch, version), probe)
            if not self.publishing.beside:
                self.settle()

    def settle(self) -> None:
        """Wait until the last version is written and announced."""
        if (ref := self.publishing.settle()) is not None:
            self._rule.published(ref.version)
