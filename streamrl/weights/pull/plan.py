"""Pulling in chunks as a pure state machine: which PULL to send next, what to do with each CHUNK.

The window of PULLs in flight is the flow control. What is lost is pulled again: a PULL that a later answer overtook (a
connection is first in, first out, so its own answer is lost), or all of them after `chunk_timeout_s` of silence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import Chunk, ChunkStatus, DeltaIndex, Layout, Limits, Manifest
from streamrl.weights.delta import HEADER_BYTES, INDEX_BUCKET, DeltaError, DeltaUnavailable, max_encoded
from streamrl.weights.document import NotAvailable, RunningDigest, VersionRetired


@dataclass(frozen=True, slots=True)
class Ask:
    """One chunk to pull: bytes offset..offset+length of a bucket."""

    bucket: int
    offset: int
    length: int


@dataclass
class PullStats:
    """Faults of one pull that were repaired."""

    repeated_pulls: int = 0
    refused_chunks: int = 0
    refused_buckets: int = 0
    surplus_chunks: int = 0
    busy: int = 0


class ChunkPlan(ABC):
    """The window, silences, repeats and refusals of one pull; a subclass says what is pulled and keeps it.

    Args:
        limits: chunk_bytes, pull_window, chunk_timeout_s.
        what: names the pulled thing in errors, "version 0:7" or "the assets".
    """

    MAX_REFUSALS = 3
    """A bucket or chunk that was refused this often is not asked for again."""
    MAX_SILENCES = 3
    """Silences of chunk_timeout_s in a row before the pull is given up."""

    def __init__(self, limits: Limits, *, what: str, now: float) -> None:
        self.what, self.stats, self.verify_s = what, PullStats(), 0.0
        self._limits = limits
        self._waiting: deque[Ask] = deque()
        self._in_flight: OrderedDict[tuple[int, int], Ask] = OrderedDict()
        self._refusals: dict[tuple[int, int], int] = {}
        # A silence is measured from the start of the pull until the first answer.
        self._not_before, self._heard_at, self._silences = now, now, 0

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @property
    def num_done(self) -> int:
        """Buckets that are complete and verified."""
        return 0

    @abstractmethod
    def progress(self) -> str:
        """The progress so far, for a log."""

    def next_ask(self, now: float) -> Ask | None:
        """The chunk to pull now, if the window has room; call `sent` when it left."""
        if now < self._not_before or not self._waiting or len(self._in_flight) >= self._limits.pull_window:
            return None
        return self._waiting[0]

    def sent(self, ask: Ask) -> None:
        self._waiting.popleft()
        self._in_flight[(ask.bucket, ask.offset)] = ask

    def next_event(self, now: float) -> float:
        """Seconds until `next_ask` or `tick` may have something to do without a chunk arriving."""
        wait = self._heard_at + self._limits.chunk_timeout_s - now
        if self._waiting and self._not_before > now:
            wait = min(wait, self._not_before - now)
        return max(0.0, wait)

    def tick(self, now: float) -> None:
        """Pull everything again after a silence; NotAvailable after the third in a row."""
        if now < self._heard_at + self._limits.chunk_timeout_s:
            return
        self._silences += 1
        if self._silences >= self.MAX_SILENCES:
            silence = f"{self._silences} x {self._limits.chunk_timeout_s:g} s"
            raise NotAvailable(f"{self.what}: nothing came for {silence}, {self.progress()}")
        self._heard_at = now
        self._pull_again(list(self._in_flight))

    def accept(self, chunk: Chunk, payload: memoryview, now: float) -> None:
        """Take what arrived; a duplicate, or the answer to a question that was not asked, changes nothing.

        Raises:
            VersionRetired: the version was retired. NotAvailable: the pull token is wrong.
            WeightsError: a chunk or bucket was wrong `MAX_REFUSALS` times; names the bucket and both digests.
        """
        self._heard_at, self._silences = now, 0
        key = (chunk.bucket, chunk.offset)
        ask = self._in_flight.get(key)
        if ask is None:
            self.stats.surplus_chunks += 1
            return
        # One connection keeps its order: PULLs sent before the one answered here have lost their answers.
        keys = list(self._in_flight)
        self._pull_again(keys[: keys.index(key)])
        del self._in_flight[key]
        if chunk.status == ChunkStatus.GONE:
            raise self._retired()
        if chunk.status == ChunkStatus.DENIED:
            raise NotAvailable(f"{self.what}: the hub refused the pull token; say HELLO again for a new one")
        if chunk.status == ChunkStatus.BUSY:
            self.stats.busy += 1
            # The time to retry comes from a peer: bounded, so that a damaged one cannot stall the pull for hours.
            self._not_before = max(self._not_before, now + min(max(chunk.retry_after_s, 0.0), 60.0))
            self._waiting.appendleft(ask)
        elif not self._fits(ask, chunk, payload) or xxhash.xxh3_64_intdigest(payload) != chunk.digest:
            self.stats.refused_chunks += 1
            self._refuse(key, f"the chunk at {ask.offset} of bucket {ask.bucket} came damaged")
            self._waiting.appendleft(ask)
        else:
            self._store(ask, chunk, payload)

    def _retired(self) -> NotAvailable:
        return VersionRetired(f"{self.what} was retired: a newer one is on its way")

    def _fits(self, ask: Ask, chunk: Chunk, payload: memoryview) -> bool:
        return len(payload) == ask.length

    @abstractmethod
    def _store(self, ask: Ask, chunk: Chunk, payload: memoryview) -> None:
        """Keep a chunk that arrived whole."""

    def _pull_again(self, keys: list[tuple[int, int]]) -> None:
        # Back to front, so that the first of them is the next one asked for again.
        for key in reversed(keys):
            self._waiting.appendleft(self._in_flight.pop(key))
            self.stats.repeated_pulls += 1

    def _refuse(self, key: tuple[int, int], reason: str) -> None:
        self._refusals[key] = self._refusals.get(key, 0) + 1
        if self._refusals[key] >= self.MAX_REFUSALS:
            raise WeightsError(f"{self.what}: {reason}, {self._refusals[key]} times")


class PullPlan(ChunkPlan):
    """Fills `buckets`, writable memory of known sizes; one counts only when it has its digest (xxh3-128)."""

    def __init__(
        self, buckets: Sequence[memoryview], digests: Sequence[bytes], limits: Limits, *, what: str, now: float
    ) -> None:
        super().__init__(limits, what=what, now=now)
        self._buckets, self._digests = buckets, digests
        self._missing = [0] * len(buckets)  # chunks
        self._running = [RunningDigest(bucket) for bucket in buckets]
        for index in range(len(buckets)):
            self._want(index)

    def _want(self, index: int) -> None:
        step, size = self._limits.chunk_bytes, len(self._buckets[index])
        asks = [Ask(index, offset, min(step, size - offset)) for offset in range(0, size, step)]
        # The length comes from the layout, never from an answer: the last chunk of a bucket is shorter.
        self._missing[index] = len(asks)
        self._waiting.extend(asks)

    @property
    def done(self) -> bool:
        return not any(self._missing)

    @property
    def num_done(self) -> int:
        return self._missing.count(0)

    def progress(self) -> str:
        return f"{self.num_done} of {len(self._buckets)} buckets verified"

    def _store(self, ask: Ask, chunk: Chunk, payload: memoryview) -> None:
        self.verify_s += self._running[ask.bucket].copy(ask.offset, payload)
        self._missing[ask.bucket] -= 1
        if self._missing[ask.bucket] == 0:
            self._close_bucket(ask.bucket)

    def _close_bucket(self, index: int) -> None:
        digest, seconds = self._running[index].finish()
        self.verify_s += seconds
        # Each chunk matched the digest sent with it, so the sender itself has other bytes than the manifest names.
        if digest != self._digests[index]:
            self.stats.refused_buckets += 1
            self._refuse(
                # Refusals of the whole bucket are counted apart from those of its chunks, whose offsets start at 0.
                (index, -1),
                f"bucket {index} of {len(self._buckets)} has digest {digest.hex()[:8]}, "
                f"manifest says {self._digests[index].hex()[:8]}",
            )
            self._want(index)


# At most 27 bytes per bucket in MessagePack: enough for the 2^20 buckets that a DeltaIndex may have.
MAX_INDEX_BYTES = 64 << 20
_DECODER = msgspec.msgpack.Decoder(DeltaIndex)


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
