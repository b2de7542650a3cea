"""Serving documents in chunks, as a pure state machine: PULL in, (CHUNK, payload) out. No socket and no thread.

The other end is `pull_plan`. The window of PULLs in flight is the flow control, and it is kept there.
"""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from streamrl.errors import ContentError, WeightsError
from streamrl.messages import Chunk, ChunkStatus, Manifest, Pull, PullMode, VersionRef
from streamrl.weights.delta.store import BUSY_RETRY_S, INDEX_BUCKET, DeltaStore, Encoding, Served
from streamrl.weights.document import HEADER_BYTES, unpack_header
from streamrl.weights.pull.budget import ByteBudget

EMPTY = memoryview(b"")


class ChunkServer:
    """Answers PULLs from the documents it holds mapped.

    Args:
        pull_token: 16 bytes that WELCOME gave to actors; anything else is DENIED.
        assets: the packed asset files (`streamrl.weights.assets`), served under mode ASSETS.
        keep_versions: newest documents that are served; older ones answer GONE.
        max_chunk_bytes: PULLs for more are refused.
        bytes_per_s: cap on what leaves the hub, over all actors; None is no cap. Over it PULLs are answered BUSY.
        delta_max_ratio: encoded size of a delta, over the full size, above which it is not served; 0 serves none.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, pull_token: bytes, assets: bytes = b"", keep_versions: int = 2, max_chunk_bytes: int = 1 << 20,
        bytes_per_s: float | None = None, delta_max_ratio: float = 0.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = pull_token
        self._assets = memoryview(assets)
        self._keep_versions = keep_versions
        self._max_chunk_bytes = max_chunk_bytes
        self._budget = None if bytes_per_s is None else ByteBudget(bytes_per_s, max_chunk_bytes, clock)
        self._documents: OrderedDict[VersionRef, Served] = OrderedDict()
        self._deltas = DeltaStore(delta_max_ratio)

    def add(
        self, manifest: Manifest, path: str | Path, bucket_bytes: Sequence[int], *, word_bytes: int = 4
    ) -> None:
        """Serve the document in `path` from now on; the oldest beyond `keep_versions` retires.

        Args:
            word_bytes: unit of this version's delta (`streamrl.weights.delta.encoding.word_bytes_of`).

        Raises:
            OSError, WeightsError: the file cannot be mapped or holds another version.
        """
        with open(path, "rb") as file:
            _, ref, nbytes = unpack_header(file.read(HEADER_BYTES))
            if ref != manifest.ref or nbytes != sum(bucket_bytes):
                raise WeightsError(f"{path} holds version {ref} of {nbytes} bytes, not {manifest.ref}")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.add_bytes(manifest, memoryview(mapping)[HEADER_BYTES : HEADER_BYTES + nbytes], bucket_bytes, word_bytes)

    def add_bytes(
        self, manifest: Manifest, body: memoryview, bucket_bytes: Sequence[int], word_bytes: int = 4
    ) -> None:
        """As `add`, for a document in memory that nobody writes any more."""
        ref = manifest.ref
        buckets, start = [], 0
        for size in bucket_bytes:
            buckets.append(body[start : start + size])
            start += size
        parent = None if manifest.parent is None else self._documents.get(manifest.parent)
        self._documents[ref] = Served(manifest, buckets)
        self._deltas.add(self._documents[ref], parent, word_bytes)
        while len(self._documents) > self._keep_versions:
            self.retire(next(iter(self._documents)))

    def retire(self, ref: VersionRef) -> None:
        """Answer GONE for this version; chunks on their way keep their bytes."""
        self._documents.pop(ref, None)
        self._deltas.retire(ref)

    @property
    def newest(self) -> VersionRef | None:
        """The version that was added last."""
        return next(reversed(self._documents), None)

    def delta_parent(self, ref: VersionRef) -> VersionRef | None:
        """Who holds this version may pull `ref` as a delta; None if there is none."""
        return self._deltas.parent_of(ref)

    def next_job(self) -> Encoding | None:
        """Encoding that somebody waits for: call its `step()`, in the thread that calls `answer`, in idle moments."""
        return self._deltas.next_job()

    def answer(self, pull: Pull) -> tuple[Chunk, memoryview]:
        """The CHUNK, and its payload for frame 1 (empty unless OK); nothing is copied.

        Raises:
            ContentError: `pull_range`, the PULL asks for bytes that cannot exist or for more than `max_chunk_bytes`.
        """
        if pull.pull_token != self._token:
            return reply(pull, ChunkStatus.DENIED), EMPTY
        source = self._source(pull)
        if source is None:
            return reply(pull, ChunkStatus.GONE), EMPTY
        if isinstance(source, Encoding):
            return reply(pull, ChunkStatus.BUSY, retry_after_s=BUSY_RETRY_S), EMPTY
        length = min(pull.length, len(source) - pull.offset) if pull.bucket == INDEX_BUCKET else pull.length
        if not 0 < length <= self._max_chunk_bytes or pull.offset + length > len(source):
            raise ContentError(
                "pull_range",
                f"PULL of {pull.length} bytes at {pull.offset} of bucket {pull.bucket}, which has {len(source)}; "
                f"at most {self._max_chunk_bytes} at once",
            )
        if self._budget is not None and (wait_s := self._budget.spend(length)) > 0:
            return reply(pull, ChunkStatus.BUSY, retry_after_s=wait_s, total=len(source)), EMPTY
        payload = source[pull.offset : pull.offset + length]
        return reply(pull, ChunkStatus.OK, total=len(source), payload=payload), payload

    def _source(self, pull: Pull) -> memoryview | Encoding | None:
        """The bytes that are asked for; a delta that is still being made; None if there are none."""
        if pull.mode == PullMode.ASSETS:
            return self._assets
        if pull.mode == PullMode.DELTA:
            encoding = self._deltas.find(pull)
            return encoding.source(pull.bucket) if encoding is not None and encoding.index is not None else encoding
        document = self._documents.get(pull.target)
        if document is None:
            return None
        if pull.bucket >= len(document.buckets):
            raise ContentError(
                "pull_range", f"PULL of bucket {pull.bucket}, version {pull.target} has {len(document.buckets)}"
            )
        return document.buckets[pull.bucket]


def reply(
    pull: Pull, status: ChunkStatus, *, retry_after_s: float = 0.0, total: int = 0, payload: memoryview = EMPTY
) -> Chunk:
    """The CHUNK that answers this PULL."""
    digest = xxhash.xxh3_64_intdigest(payload)
    return Chunk(
        pull.target, pull.mode, pull.bucket, pull.offset, status, retry_after_s, total, len(payload), digest
    )
