"""The serving side of deltas: the newest version against its parent, encoded when the first receiver asks.

    offered     both documents are mapped here; nothing is encoded yet
    encoding    a receiver asked; one bucket per step, between two answers of the socket's thread
    ready       index and payloads can be pulled, until the version retires
    declined    the encoded form would be more than `max_ratio` of the full one: receivers take the full version

After the first request later versions are encoded as they are published.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from streamrl.errors import ContentError
from streamrl.messages import DeltaIndex, Manifest, Pull, VersionRef
from streamrl.weights.delta.encoding import encode
from streamrl.weights.manifest import bucket_digest

INDEX_BUCKET = 0xFFFFFFFF
"""The bucket number under which a delta's `DeltaIndex` is pulled."""
BUSY_RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class Served:
    """One document that can be pulled."""

    manifest: Manifest
    buckets: Sequence[memoryview]


class Encoding:
    """One delta while it is encoded; used by one thread."""

    def __init__(self, new: Served, old: Served, word_bytes: int, max_ratio: float) -> None:
        self.new, self._old, self._word_bytes = new, old, word_bytes
        # A budget for the whole delta: buckets that barely changed pay for those that changed a lot.
        self._room = int(max_ratio * sum(map(len, new.buckets)))
        self._payloads: list[bytes] = []
        self.parent = old.manifest.ref
        self.declined = False
        self.index: bytes | None = None

    @property
    def finished(self) -> bool:
        return self.declined or self.index is not None

    def step(self) -> None:
        """Encode one more bucket; the last one makes the index."""
        at = len(self._payloads)
        payload = encode(
            self._old.buckets[at], self.new.buckets[at], self._word_bytes, max_nbytes=self._room,
            base_digest=self._old.manifest.digests[at], target_digest=self.new.manifest.digests[at],
        )
        # Over the budget: the payloads so far are of no use, so their memory is freed at once.
        if payload is None:
            self.declined, self._payloads = True, []
            return
        self._room -= len(payload)
        self._payloads.append(payload)
        if len(self._payloads) == len(self.new.buckets):
            sizes, digests = tuple(map(len, self._payloads)), tuple(map(bucket_digest, self._payloads))
            parent = self._old.manifest
            self.index = msgspec.msgpack.encode(DeltaIndex(parent.ref, parent.root, sizes, digests))
            self._old = self.new  # releases the parent's memory

    def source(self, bucket: int) -> memoryview:
        """The bytes behind a bucket number, `INDEX_BUCKET` included, once the index exists."""
        assert self.index is not None
        if bucket == INDEX_BUCKET:
            return memoryview(self.index)
        if bucket >= len(self._payloads):
            raise ContentError("pull_range", f"PULL of delta bucket {bucket}, there are {len(self._payloads)}")
        return memoryview(self._payloads[bucket])


class DeltaStore:
    """The deltas of one server; one over `max_ratio` of the full bytes is declined, and 0 encodes none."""

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._encodings: OrderedDict[VersionRef, Encoding] = OrderedDict()
        self._wanted = False

    def add(self, new: Served, old: Served | None, word_bytes: int) -> None:
        """Offer the delta of a new version from its parent `old`, if that is held; drop unfinished older ones."""
        # Receivers want the newest version by now; finishing an older delta would only delay its encoding.
        for ref in [ref for ref, encoding in self._encodings.items() if encoding.index is None]:
            del self._encodings[ref]
        if old is not None and self._max_ratio > 0:
            self._encodings[new.manifest.ref] = Encoding(new, old, word_bytes, self._max_ratio)

    def retire(self, ref: VersionRef) -> None:
        self._encodings.pop(ref, None)

    def parent_of(self, ref: VersionRef) -> VersionRef | None:
        """The base of this version's delta; None if there is none."""
        # One that is not finished counts: a receiver that asks for it gets BUSY until it is.
        encoding = self._encodings.get(ref)
        return None if encoding is None or encoding.declined else encoding.parent

    def next_job(self) -> Encoding | None:
        """The delta that needs a `step()` now."""
        # Without a receiver that asks, as when all actors map shared memory, no time goes into encoding.
        if not self._wanted:
            return None
        return next((encoding for encoding in self._encodings.values() if not encoding.finished), None)

    def find(self, pull: Pull) -> Encoding | None:
        """The delta that a PULL asks for, ready or not; later ones are encoded without a request."""
        self._wanted = True
        encoding = self._encodings.get(pull.target)
        return None if encoding is None or encoding.declined else encoding
