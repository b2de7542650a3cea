"""Weights between two processes on one GPU: two shared buffers of device memory and a local socket.

The broadcaster fills a slot and the reader copies it (`weights.gpu.ipc_buffers`); no weight leaves the GPU. Slots are
made and opened once, because opening is the expensive part.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import torch
import zmq

from streamrl.errors import WeightsError, WireError
from streamrl.messages.actors import InstallSource
from streamrl.messages.base import IPC_TO_ACTOR, VersionRef
from streamrl.messages.codec import Decoder, encode
from streamrl.messages.ranks import IpcBufferEnd, IpcBufferFilled, IpcBufferFree, IpcBufferOpen
from streamrl.messages.weights import IpcBufferTicket, Layout, Manifest, Offer
from streamrl.weights.document import NotAvailable, Superseded, VersionRetired
from streamrl.weights.gpu.cuda_memory import CudaMemory, wait_for_device
from streamrl.weights.gpu.device_document import DeviceDocument, HostBuckets, check_device_bucket, empty_document
from streamrl.weights.gpu.ipc_buffers import MAX_MESSAGE_BYTES, NUM_SLOTS, IpcBufferRing, ReaderSocket
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_ranges, check_manifest, document_nbytes

log = logging.getLogger(__name__)

_LOOK_UP_S = 0.05


# --- the broadcaster ----------------------------------------------------------------------------------------------


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
    """Receives one document by `ipc`; see `streamrl.weights.source.Receiver`."""

    source = InstallSource.IPC

    def __init__(self, offer: Offer, reader: IpcBufferReader) -> None:
        self._offer, self._reader = offer, reader
        self._decoder = Decoder(IPC_TO_ACTOR, max_bytes=MAX_MESSAGE_BYTES)

    def receive(
        self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
    ) -> tuple[DeviceDocument, float, float]:
        """(verified document on this device, transfer_s, verify_s).

        Raises:
            Superseded, VersionRetired, NotAvailable; WeightsError when a bucket is not what the manifest says.
        """
        device_manifest, ticket = self._offer.manifest, self._offer.slots
        if device_manifest is None or ticket is None:
            raise NotAvailable("the offer names no digests or no slots")
        check_manifest(device_manifest, layout, DIGEST_FOLD128)
        if self._reader.silence.rests(self._offer.name, time.monotonic()):
            raise NotAvailable(f"the broadcaster of the slots did not answer and is skipped for {RESTS_S:g} s")
        slots = self._reader.slots(ticket)
        started = time.monotonic()
        device = self._reader.memory.device
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
                slot = self._await(socket, manifest.ref, index, ticket, cancelled, deadline)
                body[start:end].copy_(slots[slot][: end - start])
                wait_for_device(device)
                socket.send(encode(IpcBufferFree(manifest.ref, index)))
                copied = time.monotonic()
                check_device_bucket(index, body[start:end], device_manifest)
                verify_s += time.monotonic() - copied
        except (WeightsError, RuntimeError):  # RuntimeError: no memory to fold; the others must not wait
            with contextlib.suppress(zmq.ZMQError):
                # Long enough to send the message that frees the others of this reader.
                socket.setsockopt(zmq.LINGER, 100)
                socket.send(encode(IpcBufferEnd(manifest.ref, "abandoned")), zmq.NOBLOCK)
            raise
        except zmq.ZMQError as error:
            raise NotAvailable(f"the slots' socket {self._offer.name!r} failed: {error}") from error
        finally:
            socket.close()
        document = DeviceDocument(body, manifest, device_manifest, layout)
        return document, time.monotonic() - started - verify_s, verify_s

    def _await(
        self, socket: zmq.Socket, ref: VersionRef, bucket: int, ticket: IpcBufferTicket, cancelled: threading.Event,
        deadline: float,
    ) -> int:
        """The slot that holds the bucket."""
        # The first bucket may have to wait for the end of another pass.
        patience_s = (2 if bucket == 0 else 1) * ticket.deadline_s
        began = heard_at = time.monotonic()
        until = min(deadline, began + patience_s)
        while True:
            now = time.monotonic()
            if cancelled.is_set() or now >= until:
                self._nothing_came(now - heard_at, patience_s, now)
                if cancelled.is_set():
                    raise Superseded(f"version {ref}: abandoned for a newer version")
                raise NotAvailable(f"bucket {bucket} of version {ref} did not arrive in time")
            if not socket.poll(int(1000 * min(until - now, _LOOK_UP_S)) + 1):
                continue
            heard_at = now
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

    def _nothing_came(self, seconds: float, patience_s: float, now: float) -> None:
        if self._reader.silence.waited(self._offer.name, seconds, patience_s, now):
            log.warning("the broadcaster sent no bucket for %g s and is skipped for %g s", patience_s, RESTS_S)
