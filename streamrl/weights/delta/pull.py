"""The receiving side of deltas: the base to start from, and the index. Pure; the socket is in `pull.client`."""

from __future__ import annotations

import logging
import time

import msgspec

from streamrl.errors import WeightsError
from streamrl.messages import Chunk, DeltaIndex, Layout, Limits, Manifest, VersionRef
from streamrl.weights.delta.encoding import HEADER_BYTES, DeltaError, apply, max_encoded
from streamrl.weights.delta.store import INDEX_BUCKET
from streamrl.weights.document import Document, NotAvailable
from streamrl.weights.manifest import bucket_ranges, document_nbytes
from streamrl.weights.pull.plan import Ask, ChunkPlan

log = logging.getLogger(__name__)

# At most 27 bytes per bucket in MessagePack: enough for the 2^20 buckets that a DeltaIndex may have.
MAX_INDEX_BYTES = 64 << 20
_DECODER = msgspec.msgpack.Decoder(DeltaIndex)


class DeltaUnavailable(NotAvailable):
    """The hub serves no delta of this version: it would be too large, or its parent has retired. Not a fault."""


class DeltaBase:
    """The last verified document of this process, from which deltas start.

    After `MAX_FAILURES` wrong deltas in a row only full versions are pulled, until the process starts again.
    """

    MAX_FAILURES = 2

    def __init__(self) -> None:
        self._document: Document | None = None
        self._num_failures = 0

    @property
    def trusted(self) -> bool:
        return self._num_failures < self.MAX_FAILURES

    def keep(self, document: Document) -> None:
        """Make a verified document the base, unless a newer one is held."""
        # A fetch that ends late must not replace a newer base: the next delta starts from the newest.
        if self._document is None or self._document.manifest.ref <= document.manifest.ref:
            self._document = document

    def base_of(self, manifest: Manifest, parent: VersionRef | None) -> Document | None:
        """The held document, if the delta on offer starts from it."""
        base = self._document
        if base is None or parent is None or not self.trusted or parent != manifest.parent:
            return None
        same_layout = base.manifest.layout_digest == manifest.layout_digest
        return base if base.manifest.ref == parent and same_layout else None

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, error: WeightsError) -> None:
        self._num_failures += 1
        then = "the full version is pulled" if self.trusted else "only full versions are pulled until a restart"
        log.warning("a delta failed, %s: %s", then, error)


class IndexPlan(ChunkPlan):
    """Reads a delta's index piece by piece, because its size comes with its first chunk."""

    def __init__(self, limits: Limits, *, what: str, now: float) -> None:
        super().__init__(limits, what=what, now=now)
        # Any total above 0: the real one comes with the first chunk.
        self._data, self._total = bytearray(), 1
        # One chunk at a time: later offsets are unknown before the total is.
        self._waiting.append(Ask(INDEX_BUCKET, 0, limits.chunk_bytes))

    @property
    def done(self) -> bool:
        return len(self._data) >= self._total

    def progress(self) -> str:
        return f"{len(self._data)} bytes of the index read"

    def _retired(self) -> NotAvailable:
        return DeltaUnavailable(f"{self.what}: the hub serves none, the full version is smaller")

    def _fits(self, ask: Ask, chunk: Chunk, payload: memoryview) -> bool:
        # An empty chunk would be asked for again forever, and the total decides how much memory is taken.
        return 0 < len(payload) <= ask.length and chunk.total <= MAX_INDEX_BYTES

    def _store(self, ask: Ask, chunk: Chunk, payload: memoryview) -> None:
        self._data += payload
        self._total = chunk.total
        if not self.done:
            self._waiting.append(Ask(INDEX_BUCKET, len(self._data), self._limits.chunk_bytes))

    def index(self, base: Manifest, layout: Layout) -> DeltaIndex:
        """The index that was read; DeltaError if it is malformed, for another base, or larger than a delta may be."""
        try:
            index = _DECODER.decode(self._data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DeltaError(f"{self.what}: the index is malformed: {error}") from error
        # The root too: equal numbers alone do not prove that both sides hold the same bytes.
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
    """(the verified new document in `memory`, seconds). Raises DeltaError; `memory` is undefined then."""
    assert len(memory) == document_nbytes(layout), (len(memory), document_nbytes(layout))
    started = time.perf_counter()
    for at, (start, end) in enumerate(bucket_ranges(layout)):
        apply(
            payloads[at], base.view(start, end), memory[start:end],
            base_digest=base.manifest.digests[at], target_digest=manifest.digests[at],
        )
    return Document(memory, manifest, layout, verified=True), time.perf_counter() - started
