"""Publishing of a trained version, from the decision that it is due to its announcement.

    stage     all ranks: write the version while training waits, or copy it and write it in the background
    poll      rank 0, at any time: announce what has been written meanwhile
    settle    all ranks: wait until the last version is written; a version is settled before the next is staged
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from learner.hub_client.link import HubLink
from learner.publish.probe import Prober
from learner.publish.publisher import PublishedVersion, Publisher
from learner.ranks.background import Background
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from streamrl.errors import WeightsError
from streamrl.messages import Base, Probe, VersionRef

log = logging.getLogger("streamrl.learner")


class Publishing:
    """One learner rank's part in the publication of a version.

    Args:
        background: where versions after the first are written; None writes each while training waits. Ranks that have
            to gather, or have no memory for a copy, wait too.
        base: what versions are adapters of, and the path of its document.
    """

    def __init__(
        self, publisher: Publisher, hub: HubLink, ranks: Ranks, *,
        background: Background[PublishedVersion | None] | None, base: tuple[Base, str] | None = None,
    ) -> None:
        self._publisher, self._hub, self._ranks, self._background = publisher, hub, ranks, background
        self._base = base
        self.assets_path = ""
        self.num_failed, self.nbytes = 0, 0
        self._staged = self._announced = False  # any version at all
        self._last: VersionRef | None = None  # staged and not settled
        self._succeeded = False  # and announced
        self._probe: Probe | None = None
        self.in_background = False  # how the version staged last is written; the same on all ranks
        self._running = False

    def stage(self, ref: VersionRef, probe: Probe | None) -> None:
        """Begin to publish the weights as they are now; a collective call.

        Raises WeightsError: the first version failed; a path that never worked is a broken set-up, not bad luck.
        """
        assert self._last is None, "settle the version before"
        self._last, self._probe, self._succeeded = ref, probe, False
        first, self._staged = not self._staged, True
        self.in_background = self._background is not None and not first and not self._publisher.gathers
        if self.in_background and self._start_in_background(ref):
            return
        try:
            self._announce(self._publisher.publish(ref))
        except WeightsError as error:
            self._failed(error)

    def _start_in_background(self, ref: VersionRef) -> bool:
        """False if there is no memory for a copy: versions are written while training waits from then on."""
        assert self._background is not None
        work = self._publisher.snapshot(ref)
        self.in_background = self._running = work is not None
        if work is not None:
            self._background.start(work)
            return True
        log.warning(
            "a GPU of the learner has no memory for a copy of the weights: versions are written while training waits. "
            "Lower learner.max_tokens_per_device, or raise launch.num_learner_ranks"
        )
        self.close()
        self._background = None
        return False

    def poll(self) -> None:
        """Announce a version that has just been written; never waits."""
        if self._running and self._background is not None and self._background.succeeded:
            self._take()

    @property
    def has_staged(self) -> bool:
        """A version waits for `settle`."""
        return self._last is not None

    def settle(self) -> VersionRef | None:
        """Wait for the version staged last; it, if actors can have it, on every rank. A collective call."""
        if self._last is None:
            return None
        if self._running:
            self._take()
        ref, self._last = self._last, None
        if self._ranks.maximum(float(self._succeeded)) > 0.0:
            return ref
        self._publisher.failed()
        return None

    def close(self) -> None:
        if self._background is not None:
            self._background.close()

    def _take(self) -> None:
        assert self._background is not None
        self._running = False
        try:
            self._announce(self._background.take())
        except WeightsError as error:
            self._failed(error)

    def _announce(self, published: PublishedVersion | None) -> None:
        if published is None:
            return  # not rank 0
        first, self.nbytes = not self._announced, published.nbytes
        self._hub.publish(
            msgspec.structs.replace(published.manifest, probe=self._probe), str(published.path), published.nbytes,
            self._publisher.layout if first else None, self.assets_path if first else "", published.device_manifest,
            base=self._base if first else None,
        )
        self._announced = self._succeeded = True

    def _failed(self, error: WeightsError) -> None:
        if not self._announced:
            raise error
        log.error("version %s is skipped, actors keep the one before: %s", self._last and self._last.version, error)
        self.num_failed += 1


class PublishRule(Protocol):
    """Decides which versions are worth a publication."""

    def publish_due(self, version: int, *, asked_for: bool = False) -> bool: ...

    def published(self, version: int) -> None: ...

    def starves(self, version: int) -> bool: ...


MOST_TRIES = 20
"""Publications of a version without which training would wait forever; one that finds no room takes 15 s."""


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
        self._failed = False  # the version staged last

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
            if not self.publishing.in_background:
                self.settle()

    def supply(self, version: int) -> None:
        """Publish a version again whose publication failed, before a batch is waited for that needs it.

        Raises WeightsError: it failed `MOST_TRIES` times; the same on all ranks.
        """
        num_tries = 0
        while self._rule.starves(version):
            with self._clock.timed("publish"):
                self.settle()
            if not self._failed:
                return
            if num_tries == MOST_TRIES:
                raise WeightsError(
                    f"version {version} could not be published in {num_tries} more tries, and no batch can come "
                    "without it: the log says why; then resume the run"
                )
            num_tries += 1
            log.warning("actors can generate nothing more without version %s: it is published again", version)
            self.publish(version)

    def settle(self) -> None:
        """Wait until the last version is written and announced."""
        staged = self.publishing.has_staged
        if (ref := self.publishing.settle()) is not None:
            self._rule.published(ref.version)
        if staged:
            self._failed = ref is None
