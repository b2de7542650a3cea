"""Pulling a document in chunks: both ends as pure state machines. No socket, no thread, and no clock of their own.

    ChunkServer   PULL -> (CHUNK, payload); lives in the hub beside its weight socket
    PullPlan      which PULLs to send next, what to do with each CHUNK; lives in the receiver

The window of PULLs in flight is the flow control. Whatever is lost is pulled again: a PULL that was overtaken by a
later answer (one connection is first in, first out, so its answer is gone), or all of them after `chunk_timeout_s` of
silence.
"""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from streamrl.errors import ContentError, WeightsError
from streamrl.messages import Chunk, ChunkStatus, Limits, Manifest, Pull, PullMode, VersionRef
from streamrl.weights.budget import ByteBudget
from streamrl.weights.delta_store import BUSY_RETRY_S, INDEX_BUCKET, DeltaStore, Encoding, Served
from streamrl.weights.document import HEADER_BYTES, Gone, NotAvailable, unpack_header
from streamrl.weights.running_digest import RunningDigest

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
            word_bytes: unit of this version's delta (`streamrl.weights.delta.word_bytes_of`).

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
        pull.target, pull.mode, pull.bucket, pull.offset, int(status), retry_after_s, total, len(payload), digest
    )


@dataclass(frozen=True, slots=True)
class Ask:
    """One chunk to pull: bytes offset..offset+length of a bucket."""

    bucket: int
    offset: int
    length: int


@dataclass
class PullStats:
    """What went wrong on the way, and was put right."""

    repeated_pulls: int = 0
    refused_chunks: int = 0
    refused_buckets: int = 0
    surplus_chunks: int = 0
    busy: int = 0


class PullPlan:
    """What is still missing of a document, and what to ask for next.

    Args:
        buckets: writable memory of every bucket, filled here.
        digests: xxh3-128 of every bucket; a bucket counts only when it matches.
        limits: chunk_bytes, pull_window, chunk_timeout_s.
        what: names the thing in errors, "version 0:7" or "the assets".
    """

    MAX_REFUSALS = 3
    """A bucket or chunk that was refused this often is not asked for again."""
    MAX_SILENCES = 3
    """Silences of chunk_timeout_s in a row before the way is given up."""

    def __init__(
        self, buckets: Sequence[memoryview], digests: Sequence[bytes], limits: Limits, *, what: str, now: float
    ) -> None:
        self._buckets, self._digests, self._limits, self.what = buckets, digests, limits, what
        self._waiting: deque[Ask] = deque()
        self._in_flight: OrderedDict[tuple[int, int], Ask] = OrderedDict()
        self._missing = [0] * len(buckets)  # chunks
        self._running = [RunningDigest(bucket) for bucket in buckets]
        self._refusals: dict[tuple[int, int], int] = {}
        self._not_before, self._heard_at, self._silences = now, now, 0
        self.stats = PullStats()
        self.verify_s = 0.0
        for index in range(len(buckets)):
            self._want(index)

    def _want(self, index: int) -> None:
        step, size = self._limits.chunk_bytes, len(self._buckets[index])
        asks = [Ask(index, offset, min(step, size - offset)) for offset in range(0, size, step)]
        self._missing[index] = len(asks)
        self._waiting.extend(asks)

    @property
    def done(self) -> bool:
        return not any(self._missing)

    def progress(self) -> str:
        """How far it got, for a person."""
        num_missing = sum(count > 0 for count in self._missing)
        return f"{len(self._buckets) - num_missing} of {len(self._buckets)} buckets verified"

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
        """Pull everything again after a silence.

        Raises:
            NotAvailable: the third silence in a row.
        """
        if now < self._heard_at + self._limits.chunk_timeout_s:
            return
        self._silences += 1
        if self._silences >= self.MAX_SILENCES:
            silence = f"{self._silences} x {self._limits.chunk_timeout_s:g} s"
            raise NotAvailable(f"{self.what}: nothing came for {silence}, {self.progress()}")
        self._heard_at = now
        self._pull_again(list(self._in_flight))

    def accept(self, chunk: Chunk, payload: memoryview, now: float) -> None:
        """Take what arrived. Duplicates, and answers to questions never asked, change nothing.

        Raises:
            Gone: the version was retired. NotAvailable: the pull token is wrong.
            WeightsError: a chunk or bucket was wrong `MAX_REFUSALS` times; names the bucket and both digests.
        """
        self._heard_at, self._silences = now, 0
        key = (chunk.bucket, chunk.offset)
        ask = self._in_flight.get(key)
        if ask is None:
            self.stats.surplus_chunks += 1
            return
        self._pull_again(self._overtaken_by(key))
        del self._in_flight[key]
        if chunk.status == ChunkStatus.GONE:
            raise Gone(f"{self.what} was retired: a newer one is on its way")
        if chunk.status == ChunkStatus.DENIED:
            raise NotAvailable(f"{self.what}: the hub refused the pull token; say HELLO again for a new one")
        if chunk.status == ChunkStatus.BUSY:
            self.stats.busy += 1
            self._not_before = max(self._not_before, now + min(max(chunk.retry_after_s, 0.0), 60.0))
            self._waiting.appendleft(ask)
            return
        if len(payload) != ask.length or xxhash.xxh3_64_intdigest(payload) != chunk.digest:
            self.stats.refused_chunks += 1
            self._refuse(key, f"the chunk at {ask.offset} of bucket {ask.bucket} came damaged")
            self._waiting.appendleft(ask)
            return
        self.verify_s += self._running[ask.bucket].copy(ask.offset, payload)
        self._missing[ask.bucket] -= 1
        if self._missing[ask.bucket] == 0:
            self._close_bucket(ask.bucket)

    def _overtaken_by(self, key: tuple[int, int]) -> list[tuple[int, int]]:
        keys = list(self._in_flight)
        return keys[: keys.index(key)]

    def _pull_again(self, keys: list[tuple[int, int]]) -> None:
        for key in reversed(keys):
            self._waiting.appendleft(self._in_flight.pop(key))
            self.stats.repeated_pulls += 1

    def _close_bucket(self, index: int) -> None:
        digest, seconds = self._running[index].finish()
        self.verify_s += seconds
        if digest != self._digests[index]:
            self.stats.refused_buckets += 1
            self._refuse(
                (index, -1),
                f"bucket {index} of {len(self._buckets)} has digest {digest.hex()[:8]}, "
                f"manifest says {self._digests[index].hex()[:8]}",
            )
            self._want(index)

    def _refuse(self, key: tuple[int, int], reason: str) -> None:
        self._refusals[key] = self._refusals.get(key, 0) + 1
        if self._refusals[key] >= self.MAX_REFUSALS:
            raise WeightsError(f"{self.what}: {reason}, {self._refusals[key]} times")
