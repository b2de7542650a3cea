"""The receiving side of deltas: what to start from, and reading the index. No socket here; see `zmq`."""

from __future__ import annotations

import logging
import time

import msgspec
import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import Chunk, ChunkStatus, DeltaIndex, Layout, Limits, Manifest, VersionRef
from streamrl.weights.delta.encoding import HEADER_BYTES, DeltaError, apply, max_encoded
from streamrl.weights.delta.store import INDEX_BUCKET
from streamrl.weights.document import Document, NotAvailable
from streamrl.weights.manifest import bucket_ranges, document_nbytes
from streamrl.weights.pull.plan import Ask, PullPlan, PullStats

log = logging.getLogger(__name__)

MAX_INDEX_BYTES = 64 << 20
_DECODER = msgspec.msgpack.Decoder(DeltaIndex)


class DeltaUnavailable(NotAvailable):
    """The hub serves no delta of this version: it would be too large, or its parent is gone. Nobody's fault."""


class DeltaBase:
    """The last verified document of this process, and whether deltas on it are to be trusted.

    After `MAX_FAILURES` deltas in a row that did not lead to the right bytes, only full versions are pulled until the
    process starts again.
    """

    MAX_FAILURES = 2

    def __init__(self) -> None:
        self._document: Document | None = None
        self._num_failures = 0

    @property
    def trusted(self) -> bool:
        return self._num_failures < self.MAX_FAILURES

    def keep(self, document: Document) -> None:
        """This one was verified, however it came; an older one than what is held changes nothing."""
        if self._document is None or self._document.manifest.ref <= document.manifest.ref:
            self._document = document

    def base_of(self, manifest: Manifest, parent: VersionRef | None) -> Document | None:
        """The document from which this version can be reached by the delta that is on offer, if it is held."""
        base = self._document
        if base is None or parent is None or not self.trusted or parent != manifest.parent:
            return None
        same_layout = base.manifest.layout_digest == manifest.layout_digest
        return base if base.manifest.ref == parent and same_layout else None

    def worked(self) -> None:
        self._num_failures = 0

    def failed(self, error: WeightsError) -> None:
        self._num_failures += 1
        then = "the full version is pulled" if self.trusted else "only full versions are pulled until a restart"
        log.warning("a delta failed, %s: %s", then, error)


class IndexPlan:
    """Reads a delta's index piece by piece, and waits politely while the hub is encoding; used like a `PullPlan`."""

    verify_s = 0.0

    def __init__(self, limits: Limits, *, what: str, now: float) -> None:
        self._limits, self.what = limits, what
        self._data, self._total = bytearray(), 1
        self._in_flight: Ask | None = None
        self._not_before, self._heard_at, self._silences = now, now, 0
        self.stats = PullStats()

    @property
    def done(self) -> bool:
        return len(self._data) >= self._total

    def progress(self) -> str:
        return f"{len(self._data)} bytes of the index read"

    def next_ask(self, now: float) -> Ask | None:
        if now < self._not_before or self._in_flight is not None or self.done:
            return None
        return Ask(INDEX_BUCKET, len(self._data), self._limits.chunk_bytes)

    def sent(self, ask: Ask) -> None:
        self._in_flight = ask

    def next_event(self, now: float) -> float:
        silent_at = self._heard_at + self._limits.chunk_timeout_s
        return max(0.0, min(silent_at, self._not_before) - now if self._not_before > now else silent_at - now)

    def tick(self, now: float) -> None:
        """Ask again after a silence; NotAvailable after the third in a row."""
        if now < self._heard_at + self._limits.chunk_timeout_s:
            return
        self._heard_at, self._in_flight = now, None
        self._silences += 1
        self.stats.repeated_pulls += 1
        if self._silences >= PullPlan.MAX_SILENCES:
            silence = f"{self._silences} x {self._limits.chunk_timeout_s:g} s"
            raise NotAvailable(f"{self.what}: nothing came for {silence}, {self.progress()}")

    def accept(self, chunk: Chunk, payload: memoryview, now: float) -> None:
        """Raises DeltaUnavailable: there is none. NotAvailable: the token is wrong. DeltaError: damaged repeatedly."""
        self._heard_at, self._silences = now, 0
        if self._in_flight is None or (chunk.bucket, chunk.offset) != (INDEX_BUCKET, len(self._data)):
            self.stats.surplus_chunks += 1
            return
        self._in_flight = None
        if chunk.status == ChunkStatus.GONE:
            raise DeltaUnavailable(f"{self.what}: the hub has none that is worth it")
        if chunk.status == ChunkStatus.DENIED:
            raise NotAvailable(f"{self.what}: the hub refused the pull token; say HELLO again for a new one")
        if chunk.status == ChunkStatus.BUSY:
            self.stats.busy += 1
            self._not_before = now + min(max(chunk.retry_after_s, 0.0), 60.0)
            return
        fits = 0 < len(payload) <= self._limits.chunk_bytes and chunk.total <= MAX_INDEX_BYTES
        if not fits or xxhash.xxh3_64_intdigest(payload) != chunk.digest:
            self.stats.refused_chunks += 1
            if self.stats.refused_chunks >= PullPlan.MAX_REFUSALS:
                raise DeltaError(f"{self.what}: the index came damaged {self.stats.refused_chunks} times")
            return
        self._data += payload
        self._total = chunk.total

    def index(self, base: Manifest, layout: Layout) -> DeltaIndex:
        """What was read, checked against what is held here.

        Raises:
            DeltaError: malformed, for another base, or larger than a delta may be.
        """
        try:
            index = _DECODER.decode(self._data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DeltaError(f"{self.what}: the index is malformed: {error}") from error
        if (index.parent, index.parent_root) != (base.ref, base.root):
            raise DeltaError(
                f"{self.what}: wrong base: it starts from version {index.parent} with root "
                f"{index.parent_root.hex()[:8]}, this side holds {base.ref} with {base.root.hex()[:8]}"
            )
        sizes = layout.bucket_bytes
        if len(index.nbytes) != len(sizes) or len(index.digests) != len(sizes):
            raise DeltaError(f"{self.what}: {len(index.nbytes)} encoded buckets for {len(sizes)}")
        if any(not HEADER_BYTES <= got <= max_encoded(size) for got, size in zip(index.nbytes, sizes, strict=True)):
            raise DeltaError(f"{self.what}: an encoded bucket is larger than any encoding of it, or not even a header")
        return index


def apply_delta(
    base: Document, manifest: Manifest, layout: Layout, payloads: list[memoryview], memory: memoryview
) -> tuple[Document, float]:
    """(the verified new document in `memory`, seconds); `base` is only read.

    Raises:
        DeltaError: a payload is for other buckets, malformed, or leads elsewhere; `memory` holds anything then.
    """
    assert len(memory) == document_nbytes(layout), (len(memory), document_nbytes(layout))
    started = time.perf_counter()
    for at, (start, end) in enumerate(bucket_ranges(layout)):
        apply(
            payloads[at], base.view(start, end), memory[start:end],
            base_digest=base.manifest.digests[at], target_digest=manifest.digests[at],
        )
    return Document(memory, manifest, layout, verified=True), time.perf_counter() - started
