"""What a relay answers: documents as a hub does, BUSY for what is really on its way, and soon GONE for the rest."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from streamrl.messages import Chunk, ChunkStatus, Limits, Pull, PullMode, VersionRef
from streamrl.weights.pull.chunk_server import EMPTY, ChunkServer, reply

KEEP_VERSIONS = 2
DELTA_MAX_RATIO = 0.25
WAIT_FOR_ANNOUNCE_S = 2.0
"""An actor may hear of a version before we do; after so long without it, it is sent to the learner."""
STALLED_S = 10.0
"""A fetch to which the learner has said nothing for so long brings nothing: actors are sent to the learner."""
RETRY_S = 0.05
MAX_ASKED = 64
"""Things that are not here and were asked for, whose first PULL is remembered."""


class Puller(Protocol):
    """What is looked at of a `streamrl.weights.pull.client.ZmqReceiver`."""

    waiting_since: float | None
    moved_bytes: int


class InFlightVersions:
    """What the relay is bringing, and whether it comes: told by the fetching side, asked by the socket's thread.

    Args:
        puller: the one that is at work, if bytes come through a socket at all.
        clock: monotonic seconds, the puller's.
    """

    def __init__(self, puller: Callable[[], Puller | None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._puller, self._clock = puller, clock
        self._refs: frozenset[VersionRef] | None = None
        self._failed = False

    def begins(self, *refs: VersionRef) -> None:
        """A fetch of the model's files and these versions begins, or goes on to them."""
        self._refs = frozenset(refs)

    def also(self, ref: VersionRef) -> None:
        """This version was announced: it comes next, if anything comes."""
        if self._refs is not None:
            self._refs |= {ref}

    def ends(self, *, failed: bool) -> None:
        """What it brought is here, or it did not come."""
        self._refs, self._failed = None, failed

    def __call__(self, target: VersionRef | None) -> bool:
        """Whether it is worth waiting for this version here; None asks for the model's files."""
        refs, puller = self._refs, self._puller()
        if refs is None or (target is not None and target not in refs):
            return False
        if puller is None:
            return not self._failed
        since = puller.waiting_since
        if since is not None and self._clock() - since > STALLED_S:
            return False
        # After a fetch that failed bytes are believed, and no intentions: the same way was closed a moment ago.
        return not self._failed or puller.moved_bytes > 0


class RelayChunks(ChunkServer):
    """Answers BUSY for what is on its way here: the model's files, and versions newer than all that are held.

    Args:
        pull_token, limits: from the hub's WELCOME; b"" before it, then nothing is here and no token is wrong.
        coming: whether this version (None: the model's files) is being fetched right now.
    """

    def __init__(
        self, pull_token: bytes, limits: Limits, *, coming: Callable[[VersionRef | None], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            pull_token=pull_token, keep_versions=KEEP_VERSIONS, max_chunk_bytes=limits.chunk_bytes,
            delta_max_ratio=DELTA_MAX_RATIO,
        )
        self._coming, self._clock = coming, clock
        self._first_asked: OrderedDict[VersionRef | None, float] = OrderedDict()

    def put_assets(self, assets: bytes) -> None:
        """The model's files are here."""
        self._assets = memoryview(assets)

    def answer(self, pull: Pull) -> tuple[Chunk, memoryview]:
        """As a hub does; GONE for what did not come within `WAIT_FOR_ANNOUNCE_S` and is not coming."""
        denied = self._token not in (b"", pull.pull_token)
        if denied or self._is_here(pull):
            return super().answer(pull)
        status = ChunkStatus.BUSY if self._worth_waiting(pull) else ChunkStatus.GONE
        return reply(pull, status, retry_after_s=RETRY_S), EMPTY

    def _is_here(self, pull: Pull) -> bool:
        """Or was here, and is retired."""
        if pull.mode == PullMode.ASSETS:
            return len(self._assets) > 0
        return self.newest is not None and pull.target <= self.newest

    def _worth_waiting(self, pull: Pull) -> bool:
        now, what = self._clock(), None if pull.mode == PullMode.ASSETS else pull.target
        first = self._first_asked.setdefault(what, now)
        if len(self._first_asked) > MAX_ASKED:
            self._first_asked.popitem(last=False)
        return now - first < WAIT_FOR_ANNOUNCE_S or self._coming(what)
