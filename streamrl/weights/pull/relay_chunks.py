"""Answers of a relay: documents as a hub does, BUSY for what is being fetched, and soon GONE for the rest."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from streamrl.messages import Chunk, ChunkStatus, Limits, Pull, PullMode, VersionRef
from streamrl.weights.pull.chunk_server import EMPTY, ChunkServer, reply
from streamrl.weights.pull.client import ZmqReceiver

KEEP_VERSIONS = 2
DELTA_MAX_RATIO = 0.25
WAIT_FOR_ANNOUNCE_S = 2.0
"""An announcement may reach an actor before the relay; after so long the actor is sent to the learner."""
STALLED_S = 10.0
"""A fetch without an answer of the learner for so long has stalled: actors are sent to the learner."""
RETRY_S = 0.05
MAX_ASKED = 64
"""Missing versions whose first PULL is remembered."""


class InFlightVersions:
    """The versions that a relay is fetching, with `puller` if by a socket; read by the thread that serves."""

    def __init__(
        self, puller: Callable[[], ZmqReceiver | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._puller, self._clock = puller, clock
        # Replaced, never changed: the thread that serves reads it without a lock.
        self._refs: frozenset[VersionRef] | None = None
        self._failed = False

    def begin(self, *refs: VersionRef) -> None:
        """A fetch of the model's files and these versions begins."""
        self._refs = frozenset(refs)

    def add(self, ref: VersionRef) -> None:
        """This version was announced during the fetch, and is fetched next."""
        if self._refs is not None:
            self._refs |= {ref}

    def end(self, *, failed: bool) -> None:
        """The fetch is over."""
        self._refs, self._failed = None, failed

    def __call__(self, target: VersionRef | None) -> bool:
        """Whether this version is about to be here; None asks for the model's files."""
        refs, puller = self._refs, self._puller()
        if refs is None or (target is not None and target not in refs):
            return False
        if puller is None:
            return not self._failed
        since = puller.waiting_since
        if since is not None and self._clock() - since > STALLED_S:
            return False
        # After a failed fetch only bytes count: the same endpoint did not answer a moment ago.
        return not self._failed or puller.moved_bytes > 0


class RelayChunks(ChunkServer):
    """Answers BUSY for what is being fetched: the model's files, and versions newer than all that are held.

    Args:
        pull_token, limits: from the hub's WELCOME; b"" before it, when nothing is held and no token is wrong.
        in_flight: whether this version (None: the model's files) is being fetched right now.
    """

    def __init__(
        self, pull_token: bytes, limits: Limits, *, in_flight: Callable[[VersionRef | None], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            pull_token=pull_token, keep_versions=KEEP_VERSIONS, max_chunk_bytes=limits.chunk_bytes,
            delta_max_ratio=DELTA_MAX_RATIO,
        )
        self._in_flight, self._clock = in_flight, clock
        self._first_asked: OrderedDict[VersionRef | None, float] = OrderedDict()

    def put_assets(self, assets: bytes) -> None:
        """Serve the model's files."""
        self._assets = memoryview(assets)

    def answer(self, pull: Pull) -> tuple[Chunk, memoryview]:
        """Answer as a hub does; GONE for a version not here within `WAIT_FOR_ANNOUNCE_S` and not being fetched."""
        denied = self._token not in (b"", pull.pull_token)
        if denied or self._is_here(pull):
            return super().answer(pull)
        status = ChunkStatus.BUSY if self._worth_waiting(pull) else ChunkStatus.GONE
        return reply(pull, status, retry_after_s=RETRY_S), EMPTY

    def _is_here(self, pull: Pull) -> bool:
        """Whether it is held, or was held and has retired."""
        if pull.mode == PullMode.ASSETS:
            return len(self._assets) > 0
        if self._base is not None and pull.target == self._base.manifest.ref:
            return True
        return self.newest is not None and pull.target <= self.newest

    def _worth_waiting(self, pull: Pull) -> bool:
        now, what = self._clock(), None if pull.mode == PullMode.ASSETS else pull.target
        first = self._first_asked.setdefault(what, now)
        if len(self._first_asked) > MAX_ASKED:  # peers name them: without a limit they could fill the memory
            self._first_asked.popitem(last=False)
        return now - first < WAIT_FOR_ANNOUNCE_S or self._in_flight(what)
