"""Serving documents in chunks: PULL in, (CHUNK, payload) out.

`ChunkServer` is a pure state machine, `ChunkSocket` the thread that answers a ROUTER from it. The other end is
`pull.plan`; the window of PULLs in flight, which is the flow control, is kept there.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import xxhash
import zmq

from streamrl.errors import ContentError, WeightsError, WireError
from streamrl.messages import TO_WEIGHTS, Chunk, ChunkStatus, Layout, Manifest, Pull, PullMode, VersionRef
from streamrl.messages.codec import Decoder, encode
from streamrl.transport.authentication import Authenticator
from streamrl.transport.peers import LogLimit, PeerLimit
from streamrl.weights.delta import BUSY_RETRY_S, INDEX_BUCKET, DeltaStore, Encoding, Served, word_bytes_of
from streamrl.weights.document import HEADER_BYTES, unpack_header
from streamrl.weights.manifest import bucket_ranges, document_nbytes

log = logging.getLogger("streamrl.weights")

POLL_MS = 100
# A PULL is a token and a few numbers; larger frames are refused by the socket itself.
MAX_PULL_BYTES = 4096
_SHORTEST_WAIT_S = 0.001  # a deficit of a fraction of a byte must still let the clock move
EMPTY = memoryview(b"")


class ChunkServer:
    """Answers PULLs from the documents it holds mapped.

    Args:
        pull_token: 16 bytes that WELCOME gave to actors; anything else is DENIED.
        assets: the packed asset files (`streamrl.weights.assets`), served under mode ASSETS.
        keep_versions: newest documents that are served; older ones answer GONE.
        bytes_per_s: cap over all actors, above which PULLs are answered BUSY; None is no cap.
        delta_max_ratio: encoded size of a delta, over the full size, above which it is not served; 0 serves none.
    Attributes:
        deltas: call `step()` of its `next_job()` between two calls of `answer`, in the same thread.
    """

    def __init__(
        self, *, pull_token: bytes, assets: bytes = b"", keep_versions: int = 2, max_chunk_bytes: int = 1 << 20,
        bytes_per_s: float | None = None, delta_max_ratio: float = 0.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # PULLs carry a token because a socket without keys is open to every process that reaches it.
        self._token = pull_token
        self._assets = memoryview(assets)
        self._keep_versions = keep_versions
        self._max_chunk_bytes = max_chunk_bytes
        self._budget = None if bytes_per_s is None else ByteBudget(bytes_per_s, max_chunk_bytes, clock)
        self._documents: OrderedDict[VersionRef, Served] = OrderedDict()
        self._base: Served | None = None
        self.deltas = DeltaStore(delta_max_ratio)

    def add(self, manifest: Manifest, path: str | Path, layout: Layout) -> None:
        """Serve the document in `path`; the oldest ones retire. Raises OSError, or WeightsError for another version."""
        self.add_bytes(manifest, _map(manifest, path, layout), layout)

    def add_base(self, manifest: Manifest, path: str | Path, layout: Layout) -> None:
        """Add a document that never retires."""
        self.add_base_bytes(manifest, _map(manifest, path, layout), layout)

    def add_base_bytes(self, manifest: Manifest, body: memoryview, layout: Layout) -> None:
        """Add a base in memory that does not change any more."""
        self._base = Served(manifest, [body[start:end] for start, end in bucket_ranges(layout)])

    def add_bytes(self, manifest: Manifest, body: memoryview, layout: Layout) -> None:
        """Add a document in memory that does not change any more."""
        ref = manifest.ref
        buckets = [body[start:end] for start, end in bucket_ranges(layout)]
        parent = None if manifest.parent is None else self._documents.get(manifest.parent)
        self._documents[ref] = Served(manifest, buckets)
        self.deltas.add(self._documents[ref], parent, word_bytes_of(layout))
        # The oldest first; the parent of the newest stays with two or more, so its delta can be encoded.
        while len(self._documents) > self._keep_versions:
            self.retire(next(iter(self._documents)))

    def retire(self, ref: VersionRef) -> None:
        """Answer GONE for this version; chunks that were sent keep their bytes."""
        self._documents.pop(ref, None)
        self.deltas.retire(ref)

    @property
    def newest(self) -> VersionRef | None:
        """The version that was added last."""
        return next(reversed(self._documents), None)

    def answer(self, pull: Pull) -> tuple[Chunk, memoryview]:
        """The CHUNK, and its payload for frame 1 (empty unless OK), not copied. Raises ContentError: `pull_range`."""
        # First of all checks: a peer without the token learns nothing about versions.
        if pull.pull_token != self._token:
            return reply(pull, ChunkStatus.DENIED), EMPTY
        source = self._source(pull)
        if source is None:
            return reply(pull, ChunkStatus.GONE), EMPTY
        if isinstance(source, Encoding):
            return reply(pull, ChunkStatus.BUSY, retry_after_s=BUSY_RETRY_S), EMPTY
        # Only an index may be asked for beyond its end: its size is unknown before the first chunk.
        length = min(pull.length, len(source) - pull.offset) if pull.bucket == INDEX_BUCKET else pull.length
        if not 0 < length <= self._max_chunk_bytes or pull.offset + length > len(source):
            raise ContentError(
                "pull_range",
                f"PULL of {pull.length} bytes at {pull.offset} of bucket {pull.bucket}, which has {len(source)}; "
                f"at most {self._max_chunk_bytes} at once",
            )
        # Spent last, so that refused PULLs cost the other actors nothing.
        if self._budget is not None and (wait_s := self._budget.spend(length)) > 0:
            return reply(pull, ChunkStatus.BUSY, retry_after_s=wait_s, total=len(source)), EMPTY
        payload = source[pull.offset : pull.offset + length]
        return reply(pull, ChunkStatus.OK, total=len(source), payload=payload), payload

    def _source(self, pull: Pull) -> memoryview | Encoding | None:
        """The bytes to send; a delta that is still being encoded; None if there are none."""
        if pull.mode == PullMode.ASSETS:
            return self._assets
        if pull.mode == PullMode.DELTA:
            encoding = self.deltas.find(pull)
            return encoding.source(pull.bucket) if encoding is not None and encoding.index is not None else encoding
        # A base is kept apart from the versions: it never retires.
        base = self._base
        document = base if base is not None and base.manifest.ref == pull.target else self._documents.get(pull.target)
        if document is None:
            return None
        if pull.bucket >= len(document.buckets):
            raise ContentError(
                "pull_range", f"PULL of bucket {pull.bucket}, version {pull.target} has {len(document.buckets)}"
            )
        return document.buckets[pull.bucket]


def _map(manifest: Manifest, path: str | Path, layout: Layout) -> memoryview:
    """The body of the document in `path`."""
    with open(path, "rb") as file:
        _, ref, nbytes = unpack_header(file.read(HEADER_BYTES))
        if ref != manifest.ref or nbytes != document_nbytes(layout):
            raise WeightsError(f"{path} holds version {ref} of {nbytes} bytes, not {manifest.ref}")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return memoryview(mapping)[HEADER_BYTES : HEADER_BYTES + nbytes]


def reply(
    pull: Pull, status: ChunkStatus, *, retry_after_s: float = 0.0, total: int = 0, payload: memoryview = EMPTY
) -> Chunk:
    """The CHUNK that answers this PULL."""
    digest = xxhash.xxh3_64_intdigest(payload)
    return Chunk(pull.target, pull.mode, pull.bucket, pull.offset, status, retry_after_s, total, len(payload), digest)


class ByteBudget:
    """A token bucket under a cap of bytes per second; it holds a tenth of a second, but at least one chunk."""

    def __init__(self, bytes_per_s: float, chunk_bytes: int, clock: Callable[[], float]) -> None:
        self._rate, self._clock = bytes_per_s, clock
        # At least one chunk: with less, a chunk larger than the room could never be granted.
        self._room = max(chunk_bytes, bytes_per_s / 10)
        self._left, self._at = self._room, clock()

    def spend(self, nbytes: int) -> float:
        """Seconds to wait; 0 when the bytes are granted."""
        now = self._clock()
        self._left = min(self._room, self._left + (now - self._at) * self._rate)
        self._at = now
        if nbytes <= self._left:
            self._left -= nbytes
            return 0.0
        return max((nbytes - self._left) / self._rate, _SHORTEST_WAIT_S)


class ChunkSocket:
    """Serves PULLs in a thread of its own, because bulk must not delay a heartbeat.

    Args:
        socket: a bound ROUTER; used by the thread alone once it has started, closed by `close`.
        authenticator: of this socket, if it asks for keys.
    Attributes:
        num_bytes_served: payload bytes sent to all pullers.
        lock: held, answers pause: for a change of the documents.
    """

    def __init__(self, socket: zmq.Socket, authenticator: Authenticator | None = None) -> None:
        self.num_bytes_served = 0
        self._socket, self._authenticator = socket, authenticator
        self.peers = PeerLimit(socket)
        self._limited_log = LogLimit(log)
        self._chunks: ChunkServer | None = None
        self.lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def serve(self, chunks: ChunkServer) -> None:
        """Answer from this server from now on; before the first call PULLs are dropped."""
        with self.lock:
            self._chunks = chunks

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self.peers.close()
        self._socket.close(linger=0)

    def _run(self) -> None:
        """Answers come first; a delta is encoded one bucket at a time while no PULL waits."""
        decoder = Decoder(TO_WEIGHTS, max_bytes=MAX_PULL_BYTES)
        poller, next_tick = zmq.Poller(), 0.0
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.peers.monitor, zmq.POLLIN)
        while not self._stopping.is_set():
            with self.lock:
                job = self._chunks.deltas.next_job() if self._chunks is not None else None
            ready, now = dict(poller.poll(POLL_MS if job is None else 0)), time.monotonic()
            if now >= next_tick or (self.peers.monitor in ready and self.peers.watch(now)):
                next_tick = now + POLL_MS / 1000
                self.peers.tick(now)
            if self._socket in ready:
                self._answer_one(decoder, now)
            elif job is not None:
                job.step()  # outside the lock, so that adding a document does not wait for it

    def _answer_one(self, decoder: Decoder, now: float) -> None:
        *_, frame = frames = self._socket.recv_multipart(copy=False)
        routing_id = frames[0].bytes
        if self._authenticator is not None and not self._authenticator.name_of(frame):
            return  # its key was removed after it had connected
        try:
            pull = decoder.decode(frames[1].buffer)
            assert isinstance(pull, Pull)
            with self.lock:
                if self._chunks is None:
                    return
                chunk, payload = self._chunks.answer(pull)
        except (WireError, IndexError) as error:
            self._limited_log.warning("refused a pull: %s", error)
            self.peers.refuse(frame, routing_id)
            return
        self.peers.heard(frame, now, None if chunk.status == ChunkStatus.DENIED else routing_id)
        self.num_bytes_served += len(payload)  # before sending: the receiver may read the counter at once
        try:
            self._socket.send_multipart([routing_id, encode(chunk), payload], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # the puller is disconnected or slow, and asks again
            self.num_bytes_served -= len(payload)
            log.debug("a chunk was not sent: %s", error)
