"""Weights between two processes on one GPU: two shared buffers of device memory and a local socket.

The broadcaster fills a slot with a bucket, each reader copies and frees it; no weight leaves the GPU. Slots are made
and opened once, because opening is the expensive part.

A pass sends one document to all readers that asked before it began, in lockstep: a slot is filled again once every
reader has freed it. A late reader is dropped: what it was about to copy may be overwritten, which its digest then
shows. A reader that asks during a pass waits for the next one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence

import torch
import zmq

from streamrl.errors import WeightsError, WireError
from streamrl.messages import (
    ACTOR_TO_IPC,
    IPC_TO_ACTOR,
    InstallSource,
    IpcBufferEnd,
    IpcBufferFilled,
    IpcBufferFree,
    IpcBufferOpen,
    IpcBufferTicket,
    Layout,
    Manifest,
    Message,
    Offer,
    VersionRef,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.document import NotAvailable, VersionRetired
from streamrl.weights.gpu.cuda_memory import CudaMemory, wait_for_device
from streamrl.weights.gpu.device_document import DeviceDocument, HostBuckets, check_device_bucket, empty_document
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_ranges, check_manifest, document_nbytes
from streamrl.weights.transport import POLL_S

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


class IpcBufferServer:
    """Passes documents on to the readers on this GPU; a thread of its own. Close it.

    Args:
        endpoint: ipc:// path of the local socket, in a folder that only this user may enter.
        slot_bytes: of each slot; at least a bucket.
        deadline_s: see `IpcBufferRing`.
    """

    def __init__(
        self, memory: CudaMemory, context: zmq.Context, endpoint: str, *, slot_bytes: int, deadline_s: float = 10.0
    ) -> None:
        self.endpoint = endpoint
        made = [memory.create(slot_bytes) for _ in range(NUM_SLOTS)]
        self.ticket = IpcBufferTicket(memory.device_id, tuple(handle for _, handle in made), slot_bytes, deadline_s)
        self._stopping = threading.Event()
        self._wire = ReaderSocket(context, endpoint)
        self._ring = IpcBufferRing(
            self._wire, [tensor for tensor, _ in made], deadline_s=deadline_s, stopped=self._stopping.is_set
        )
        self._thread = threading.Thread(target=self._run, name="slots", daemon=True)
        self._thread.start()

    def publish(self, ref: VersionRef, source: HostBuckets) -> None:
        """Serve this version to readers that ask for it; returns at once.

        Raises:
            WeightsError: a bucket is larger than a slot.
        """
        if (largest := max(source.layout.bucket_bytes)) > self.ticket.slot_bytes:
            raise WeightsError(f"a bucket of {largest} bytes does not fit into a slot of {self.ticket.slot_bytes}")
        self._ring.publish(ref, source)

    @property
    def stuck(self) -> bool:
        """Whether the readers are no longer served: the thread died, or one copy exceeds their deadline."""
        since = self._ring.filling_since
        hangs = since is not None and time.monotonic() - since > self.ticket.deadline_s
        return hangs or not self._thread.is_alive()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._ring.serve()
        self._wire.close()


# --- a reader -----------------------------------------------------------------------------------------------------

RESTS_S = 30.0
"""For so long a peer that did not answer is not asked."""
_ROUNDING_S = 1e-3


class PeerBackoff:
    """Back-off for one unresponsive peer, over all fetches: a single fetch may be too short to tell."""

    def __init__(self) -> None:
        self._address = ""
        self._waited_s = 0.0
        self._until = float("-inf")

    def rests(self, address: str, now: float) -> bool:
        """Whether this peer is in back-off; a peer at another address is another one."""
        return address == self._address and now < self._until

    def heard(self, address: str) -> None:
        """A message of the peer arrived."""
        if address == self._address:
            self._waited_s = 0.0

    def waited(self, address: str, seconds: float, limit_s: float, now: float) -> bool:
        """Add a wait without an answer; True if that makes `limit_s` in a row, which starts a back-off."""
        if address != self._address:
            self._address, self._waited_s, self._until = address, 0.0, float("-inf")
        self._waited_s += seconds
        if self._waited_s < limit_s - _ROUNDING_S:
            return False
        self._waited_s, self._until = 0.0, now + RESTS_S
        return True


class IpcBufferReader:
    """An actor's open buffers; as long-lived as the process, used by one fetch at a time."""

    def __init__(self, memory: CudaMemory, context: zmq.Context) -> None:
        self.memory, self.context = memory, context
        self.silence = PeerBackoff()
        # Kept open over all fetches: opening is the expensive part.
        self._open: tuple[IpcBufferTicket, list[torch.Tensor]] | None = None
        self._full_at = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] for a document. Raises NotAvailable without room for it, at once after the first time."""
        if 0 < self._full_at <= nbytes:
            raise NotAvailable("the GPU had no memory for a document before")
        try:
            return empty_document(nbytes, self.memory.device)
        except torch.OutOfMemoryError as error:
            self._full_at = nbytes
            log.warning("no weights by ipc from now on, other transports bring them: %s", error)
            raise NotAvailable(f"the GPU has no memory for a document of {nbytes >> 20} MiB") from error

    def slots(self, ticket: IpcBufferTicket) -> list[torch.Tensor]:
        """The broadcaster's slots here; opened at the first call, and again when the broadcaster is a new one.

        Raises:
            NotAvailable: they are on another device, or cannot be opened.
        """
        if ticket.device != self.memory.device_id:
            raise NotAvailable(f"the slots are on device {ticket.device}, this actor is on {self.memory.device_id}")
        if self._open is None or self._open[0] != ticket:
            self._open = None  # closes those of a former broadcaster
            try:
                opened = [self.memory.open(handle, ticket.slot_bytes) for handle in ticket.handles]
            except WeightsError as error:
                raise NotAvailable(f"the broadcaster's slots cannot be opened here: {error}") from error
            self._open = (ticket, opened)
        return self._open[1]


class IpcBufferReceiver:
    """Receives one document by `ipc`; see `streamrl.weights.transport.Receiver`."""

    source = InstallSource.IPC

    def __init__(self, offer: Offer, reader: IpcBufferReader) -> None:
        self._offer, self._reader = offer, reader
        self._decoder = Decoder(IPC_TO_ACTOR, max_bytes=MAX_MESSAGE_BYTES)

    def receive(self, manifest: Manifest, layout: Layout) -> Generator[int, None, DeviceDocument]:
        """Copy bucket after bucket out of the slots, each verified while the next one is filled.

        Raises:
            VersionRetired, NotAvailable; WeightsError when a bucket is not what the manifest says.
        """
        device_manifest, ticket = self._offer.manifest, self._offer.slots
        if device_manifest is None or ticket is None:
            raise NotAvailable("the offer names no digests or no slots")
        check_manifest(device_manifest, layout, DIGEST_FOLD128)
        if self._reader.silence.rests(self._offer.name, time.monotonic()):
            raise NotAvailable(f"the broadcaster of the slots did not answer and is skipped for {RESTS_S:g} s")
        slots = self._reader.slots(ticket)
        # Before asking for the first bucket, so that a lack of memory holds no other reader.
        body = self._reader.allocate(document_nbytes(layout))
        socket = self._reader.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        verify_s = 0.0
        try:
            socket.connect(self._offer.name)
            socket.send(encode(IpcBufferOpen(manifest.ref)))
            for index, (start, end) in enumerate(bucket_ranges(layout)):
                # Copied, then freed, then verified: the slot is free for the next bucket while this one is folded.
                slot = yield from self._await(socket, manifest.ref, index, ticket)
                body[start:end].copy_(slots[slot][: end - start])
                wait_for_device(self._reader.memory.device)
                socket.send(encode(IpcBufferFree(manifest.ref, index)))
                copied = time.monotonic()
                check_device_bucket(index, body[start:end], device_manifest)
                verify_s += time.monotonic() - copied
        # RuntimeError: no memory to fold. GeneratorExit: abandoned. The others must not wait for this reader.
        except (WeightsError, RuntimeError, GeneratorExit):
            with contextlib.suppress(zmq.ZMQError):
                # Long enough to send the message that frees the others of this reader.
                socket.setsockopt(zmq.LINGER, 100)
                socket.send(encode(IpcBufferEnd(manifest.ref, "abandoned")), zmq.NOBLOCK)
            raise
        except zmq.ZMQError as error:
            raise NotAvailable(f"the slots' socket {self._offer.name!r} failed: {error}") from error
        finally:
            socket.close()
        return DeviceDocument(body, manifest, device_manifest, layout, verify_s=verify_s)

    def _await(
        self, socket: zmq.Socket, ref: VersionRef, bucket: int, ticket: IpcBufferTicket
    ) -> Generator[int, None, int]:
        """The slot that holds the bucket."""
        # The first bucket may have to wait for the end of another pass.
        patience_s = (2 if bucket == 0 else 1) * ticket.deadline_s
        began = heard_at = time.monotonic()
        try:
            while (left_s := began + patience_s - time.monotonic()) > 0:
                yield bucket
                if not socket.poll(int(1000 * min(left_s, POLL_S)) + 1):
                    continue
                heard_at = time.monotonic()
                self._reader.silence.heard(self._offer.name)
                try:
                    message = self._decoder.decode(socket.recv())
                except WireError as error:
                    raise NotAvailable(f"the broadcaster of the slots sent an unexpected message: {error}") from error
                match message:
                    case IpcBufferEnd(about, reason, gone) if about == ref:
                        raise (VersionRetired if gone else NotAvailable)(f"version {ref}: {reason}")
                    case IpcBufferFilled(about, which, slot) if (about, which) == (ref, bucket) and (
                        slot < len(ticket.handles)
                    ):
                        return slot
            raise self._timeout_error(ref, bucket, time.monotonic() - heard_at, patience_s)
        except GeneratorExit:  # a fetch may be too short to tell that nobody answers: its silence counts all the same
            self._timeout_error(ref, bucket, time.monotonic() - heard_at, patience_s)
            raise

    def _timeout_error(self, ref: VersionRef, bucket: int, silent_s: float, patience_s: float) -> NotAvailable:
        """The error of a bucket that did not come; a peer that was silent for so long, over all fetches, rests."""
        if self._reader.silence.waited(self._offer.name, silent_s, patience_s, time.monotonic()):
            log.warning("the broadcaster sent no bucket for %g s and is skipped for %g s", patience_s, RESTS_S)
        return NotAvailable(f"bucket {bucket} of version {ref} did not arrive in time")
