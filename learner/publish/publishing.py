"""Publishing of a trained version, staged while training waits or beside it from a copy, up to its announcement.

    stage     all ranks: write the version, or copy it and begin to write it in a thread
    poll      rank 0, at any time: announce what has been written meanwhile
    settle    all ranks: wait until the last version is written; a version is settled before the next is staged
"""

from __future__ import annotations

import logging

import msgspec

from learner.hub_client.link import HubLink
from learner.publish.publisher import PublishedVersion, Publisher
from learner.ranks.background import Background
from learner.ranks.mesh import Ranks
from streamrl.errors import WeightsError
from streamrl.messages import Base, Probe, VersionRef

log = logging.getLogger("streamrl.learner")


class Publishing:
    """One learner rank's part in it.

    Args:
        beside: where versions after the first are written; None writes each while training waits. Ranks that have to
            gather, or have no memory for a copy, wait too.
        base: what versions are adapters of, and the path of its document.
    """

    def __init__(
        self, publisher: Publisher, hub: HubLink, ranks: Ranks, *, beside: Background[PublishedVersion | None] | None,
        base: tuple[Base, str] | None = None,
    ) -> None:
        self._publisher, self._hub, self._ranks, self._beside = publisher, hub, ranks, beside
        self._base = base
        self.assets_path = ""
        self.num_failed, self.nbytes = 0, 0
        self._staged = self._announced = False  # any version at all
        self._last: VersionRef | None = None  # staged and not settled
        self._succeeded = False  # and announced
        self._probe: Probe | None = None
        self.beside = False  # the version staged last is written beside training; the same on all ranks
        self._running = False

    def stage(self, ref: VersionRef, probe: Probe | None) -> None:
        """Begin to publish the weights as they are now; a collective call.

        Raises WeightsError: the first version failed; a path that never worked is a broken set-up, not bad luck.
        """
        assert self._last is None, "settle the version before"
        self._last, self._probe, self._succeeded = ref, probe, False
        first, self._staged = not self._staged, True
        self.beside = self._beside is not None and not first and not self._publisher.gathers
        if self.beside and self._start_beside(ref):
            return
        try:
            self._announce(self._publisher.publish(ref))
        except WeightsError as error:
            self._failed(error)

    def _start_beside(self, ref: VersionRef) -> bool:
        """False if there is no memory for a copy: versions are written while training waits from then on."""
        assert self._beside is not None
        work = self._publisher.snapshot(ref)
        self.beside = self._running = work is not None
        if work is not None:
            self._beside.start(work)
            return True
        log.warning(
            "a GPU of the learner has no memory for a copy of the weights: versions are written while training waits. "
            "Lower learner.max_tokens_per_device, or raise launch.num_learner_ranks"
        )
        self.close()
        self._beside = None
        return False

    def poll(self) -> None:
        """Announce a version that has just been written; never waits."""
        if self._running and self._beside is not None and self._beside.succeeded:
            self._take()

    def settle(self) -> VersionRef | None:
        """Wait for the version staged last; it, if actors can have it, on every rank. A collective call."""
        if self._last is None:
            return None
        if self._running:
            self._take()
        ref, self._last = self._last, None
        return ref if self._ranks.maximum(float(self._succeeded)) > 0.0 else None

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def _take(self) -> None:
        assert self._beside is not None
        self._running = False
        try:
            self._announce(self._beside.take())
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
