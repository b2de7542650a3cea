"""Ownership of the IPC buffers on one GPU: the broadcaster fills a slot with a bucket, each reader copies and frees it.

A pass sends one document to all readers that asked before it began, in lockstep: a slot is filled again once every
reader has freed it. A late reader is dropped: what it was about to copy may be overwritten, which its digest then
shows. A reader that asks during a pass waits for the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
import zmq

from streamrl.errors import WireError
from streamrl.messages import (
    ACTOR_TO_IPC,
    IpcBufferEnd,
    IpcBufferFilled,
    IpcBufferFree,
    IpcBufferOpen,
    Message,
    VersionRef,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.gpu.device_document import HostBuckets

log = logging.getLogger(__name__)

# One is filled while readers copy the other.
NUM_SLOTS = 2
# A new version is noticed this often.
_LOOK_UP_S = 0.02
# Read in a row, so that a flood of messages cannot keep late readers from being dropped.
_MAX_MESSAGES = 256
MAX_MESSAGE_BYTES = 4096


class ReaderSocket:
    """The readers of `IpcBufferRing`, over a local socket."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self._decoder = Decoder(ACTOR_TO_IPC, max_bytes=MAX_MESSAGE_BYTES)
        self._socket = context.socket(zmq.ROUTER)
        # A send to a reader that has left raises instead of being dropped without notice.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)

    def receive(self, timeout_s: float) -> tuple[bytes, Message] | None:
        """The next reader and its message; None if none came in time."""
        if not self._socket.poll(int(1000 * timeout_s)):
            return None
        try:
            reader, frame = self._socket.recv_multipart()
            return reader, self._decoder.decode(frame)
        except (WireError, ValueError) as error:
            log.warning("refused a message at the IPC buffers: %s", error)
            return None

    def send(self, reader: bytes, message: Message) -> bool:
        """Whether the message was queued; a reader for which it was not has left."""
        try:
            self._socket.send_multipart([reader, encode(message)], zmq.NOBLOCK)
            return True
        except zmq.ZMQError as error:  # it left or reads nothing: it must not block the others
            log.debug("a reader of the IPC buffers left: %s", error)
            return False

    def close(self) -> None:
        self._socket.close(linger=0)


class IpcBufferRing:
    """Serves readers from one thread; `publish` may be called from another.

    Args:
        slots: the buffers, each at least as long as a bucket.
        deadline_s: for a reader to copy one bucket; and to wait for a version that was announced but is not here yet.
        stopped: whether to serve no more.
    """

    def __init__(
        self, wire: ReaderSocket, slots: Sequence[torch.Tensor], *, deadline_s: float, stopped: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wire, self._slots, self._deadline_s, self._stopped, self._clock = wire, slots, deadline_s, stopped, clock
        self._newest: tuple[VersionRef, HostBuckets] | None = None
        self._waiting: dict[bytes, tuple[VersionRef, float]] = {}  # reader -> its version, until when
        self._sent: VersionRef | None = None  # of the pass in progress, with its readers
        self._readers: set[bytes] = set()
        self._unread: dict[tuple[bytes, int], float] = {}  # (reader, bucket that it has still to copy) -> until when
        self.filling_since: float | None = None

    def publish(self, ref: VersionRef, source: HostBuckets) -> None:
        """Serve this version from now on; a pass in progress continues to its end."""
        self._newest = ref, source

    def serve(self) -> None:
        """Hear the readers; send the newest version to those that wait for it, if any."""
        self._hear()
        if self._newest is None:
            return
        ref, source = self._newest
        # Readers of a version that was announced but is not here yet stay waiting.
        self._readers = {reader for reader, (wanted, _) in self._waiting.items() if wanted == ref}
        for reader in self._readers:
            del self._waiting[reader]
        self._sent = ref
        self._send(ref, source)
        self._sent, self._readers = None, set()

    def _send(self, ref: VersionRef, source: HostBuckets) -> None:
        """One pass: every bucket to every reader that is still there."""
        num_buckets = len(source.layout.bucket_bytes)
        for bucket in range(num_buckets + len(self._slots)):
            # The slot's former bucket; beyond the last bucket this waits for the end of the pass.
            self._wait_until_copied(bucket - len(self._slots))
            if not self._readers or self._stopped():
                return
            if bucket < num_buckets and not self._fill(ref, source, bucket):
                return

    def _wait_until_copied(self, bucket: int) -> None:
        while any(which == bucket for _, which in self._unread) and not self._stopped():
            self._hear()

    def _fill(self, ref: VersionRef, source: HostBuckets, bucket: int) -> bool:
        """Fill a free slot and tell the readers; False if the document cannot be read."""
        slot, self.filling_since = bucket % len(self._slots), self._clock()
        try:
            source.fill(bucket, self._slots[slot])
        except Exception as error:  # a document that cannot be read ends its pass, not this thread
            log.warning("bucket %d of version %s cannot be read: %r", bucket, ref, error)
            for reader in sorted(self._readers):
                self._end(reader, ref, f"it cannot be read: {error!r}")
            return False
        finally:
            self.filling_since = None
        for reader in sorted(self._readers):
            self._unread[reader, bucket] = self._clock() + self._deadline_s
            self._tell(reader, IpcBufferFilled(ref, bucket, slot))
        return True

    # --- readers --------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take the readers' messages, then drop those that are late."""
        timeout_s = _LOOK_UP_S
        for _ in range(_MAX_MESSAGES):
            if (heard := self._wire.receive(timeout_s)) is None:
                break
            timeout_s = 0.0
            match heard:
                case reader, IpcBufferOpen(ref):  # instead of what it asked for before
                    self._forget(reader)
                    self._waiting[reader] = ref, self._clock() + self._deadline_s
                case reader, IpcBufferFree(ref, bucket) if ref == self._sent:
                    self._unread.pop((reader, bucket), None)
                case reader, IpcBufferEnd():
                    self._forget(reader)
        self._drop_late(self._clock())

    def _drop_late(self, now: float) -> None:
        newest = self._newest[0] if self._newest is not None else None
        for reader, (ref, until) in list(self._waiting.items()):
            if newest is not None and ref < newest:
                self._end(reader, ref, f"version {ref} was retired for {newest}", gone=True)
            elif now >= until and ref != self._sent:
                self._end(reader, ref, f"version {ref} did not come in {self._deadline_s:g} s")
        for reader in sorted({reader for (reader, _), until in self._unread.items() if now >= until}):
            assert self._sent is not None
            self._end(reader, self._sent, f"a bucket was not copied in {self._deadline_s:g} s")

    def _end(self, reader: bytes, ref: VersionRef, reason: str, *, gone: bool = False) -> None:
        self._forget(reader)
        self._tell(reader, IpcBufferEnd(ref, reason[:512], gone))

    def _tell(self, reader: bytes, message: Message) -> None:
        if not self._wire.send(reader, message):
            self._forget(reader)

    def _forget(self, reader: bytes) -> None:
        self._waiting.pop(reader, None)
        self._readers.discard(reader)
        self._unread = {key: until for key, until in self._unread.items() if key[0] != reader}
