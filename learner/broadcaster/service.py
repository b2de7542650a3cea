"""The broadcaster's loop: commands of the hub in, reports out; a second thread makes the calls that may block.

    hub --DEALER--> loop --queue--> epochs thread (name, form, send)
                     |                    |
                     +-- stop() ----------+    an abort overtakes the call in progress

Every second the loop sends ALIVE, unless the thread of the IPC buffers hangs: the hub replaces a silent broadcaster.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
import zmq

from learner.hub.context.broadcaster_process import EXIT_NO_MEMORY
from streamrl.errors import StreamrlError, WeightsError
from streamrl.messages import (
    HUB_TO_BROADCASTER,
    BroadcastAbort,
    BroadcastDocument,
    BroadcastForm,
    BroadcastReport,
    BroadcastSend,
    BroadcastStage,
    BroadcastUp,
    Message,
    Shutdown,
    VersionRef,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.transport.authentication import connect_with
from streamrl.transport.keys import ActorKey
from streamrl.transport.sockets import allow_ipv6
from streamrl.weights.document import Document
from streamrl.weights.gpu.broadcast import GRACE_S, Broadcaster
from streamrl.weights.gpu.device_document import HostBuckets
from streamrl.weights.gpu.ipc import IpcBufferServer
from streamrl.weights.gpu.nccl import CommunicatorStuck

log = logging.getLogger("streamrl.broadcaster")

EXIT_STUCK = 9
POLL_MS = 20
"""How late a report of the other thread may leave."""
ALIVE_S = 1.0
"""Between two ALIVE reports; the hub ends a broadcaster that sends none for long."""


class BroadcasterService:
    """Holds the communicator and the slots for one hub.

    Args:
        endpoint: the hub's rank socket.
        broadcaster: None without the transport nccl.
        slots: None without the transport ipc.
        pinned: whether documents go to the device through pinned host memory.
        device: this process's GPU, as actors name theirs.
        key: shown to a hub whose rank socket other machines reach.
    """

    def __init__(
        self, context: zmq.Context, endpoint: str, *, broadcaster: Broadcaster | None, slots: IpcBufferServer | None,
        init_deadline_s: float, bucket_deadline_s: float, pinned: bool, device: str = "", key: ActorKey | None = None,
    ) -> None:
        self._broadcaster, self._slots, self._pinned = broadcaster, slots, pinned
        self._init_s, self._bucket_s, self._device = init_deadline_s, bucket_deadline_s, device
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        if key is not None:
            connect_with(self._socket, key)
        allow_ipv6(self._socket, endpoint)
        self._socket.connect(endpoint)
        self._decoder = Decoder(HUB_TO_BROADCASTER, max_bytes=1 << 30)
        self._documents: dict[VersionRef, Document] = {}
        self._bounces: dict[str, torch.Tensor | None] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reports: deque[BroadcastReport] = deque()
        self._over: set[int] = set()
        self._alive_at = float("-inf")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="document")
        self._ends = threading.Event()
        self._exit_status = 0
        self._thread = threading.Thread(target=self._do_work, name="epochs", daemon=True)

    def run(self, stop: Callable[[], bool]) -> int:
        """Serve until the hub says Shutdown, `stop` is true, or a call cannot be ended; returns the exit status."""
        self._thread.start()
        slots = self._slots
        self._socket.send(encode(
            BroadcastUp(self._device or slots.ticket.device, slots.endpoint, slots.ticket) if slots is not None
            else BroadcastUp(self._device, "", None)
        ))
        try:
            while not stop() and not self._ends.is_set():
                heard = self._socket.poll(POLL_MS)
                while self._reports:
                    self._socket.send(encode(self._reports.popleft()))
                self._say_alive()
                if heard and not self._hear(self._decoder.decode(self._socket.recv())):
                    return 0
            return self._exit_status
        finally:
            self._close()

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now < self._alive_at + ALIVE_S or (self._slots is not None and self._slots.stuck):
            return
        self._alive_at = now
        self._socket.send(encode(BroadcastReport(0, BroadcastStage.ALIVE)))

    def _hear(self, message: Message) -> bool:
        """Handle one command of the hub; False if it was the last."""
        match message:
            case BroadcastDocument():
                self._take(message)
            case BroadcastForm(epoch, world):
                self._work.put(lambda: self._attempt(epoch, lambda broadcaster: self._form(broadcaster, epoch, world)))
            case BroadcastSend(epoch, ref):
                self._work.put(lambda: self._attempt(epoch, lambda broadcaster: self._send(broadcaster, epoch, ref)))
            case BroadcastAbort(epoch):
                self._over.add(epoch)
                if self._broadcaster is not None:
                    self._broadcaster.stop()
            case Shutdown():
                return False
        return True

    def _take(self, message: BroadcastDocument) -> None:
        """Map and check the newest document; the previous one is kept, a broadcast of it may be in progress."""
        ref = message.manifest.ref
        try:
            document = self._open(message)
        except (OSError, WeightsError) as error:
            log.warning("version %s cannot be sent: %s", ref, error)
            self._reports.append(BroadcastReport(0, BroadcastStage.LOADED, error=str(error)[:2000], ref=ref))
            return
        for old in sorted(self._documents)[:-1]:
            del self._documents[old]
        self._documents[ref] = document
        self._reports.append(BroadcastReport(0, BroadcastStage.LOADED, ref=ref))
        if self._slots is not None:
            try:
                self._slots.publish(ref, self._buckets("ipc", document))
            except WeightsError as error:
                log.warning("version %s is not served by ipc: %s", ref, error)

    def _open(self, message: BroadcastDocument) -> Document:
        """Open and verify a document. ALIVE reports continue: it may take longer than the hub's deadline."""
        done = self._files.submit(lambda: Document.map_file(message.path, message.manifest, message.layout).verify())
        while not wait([done], timeout=ALIVE_S).done:
            self._say_alive()
        return done.result()

    def _buckets(self, user: str, document: Document) -> HostBuckets:
        if self._pinned and user not in self._bounces:
            size = max(document.layout.bucket_bytes)
            self._bounces[user] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return HostBuckets(document, self._bounces.get(user))

    # --- the epochs thread --------------------------------------------------------------------------------------

    def _do_work(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _form(self, broadcaster: Broadcaster, epoch: int, world: int) -> None:
        unique_id = broadcaster.name()
        self._reports.append(BroadcastReport(epoch, BroadcastStage.NAMED, unique_id))
        # The hub's deadline comes first: it knows which member is missing, and ends this process.
        broadcaster.form(epoch, world, unique_id, self._init_s + GRACE_S)
        self._reports.append(BroadcastReport(epoch, BroadcastStage.FORMED))

    def _send(self, broadcaster: Broadcaster, epoch: int, ref: VersionRef) -> None:
        document = self._documents.get(ref)
        if document is None:
            raise WeightsError(f"version {ref} is not loaded")
        began = time.monotonic()
        broadcaster.send(
            ref, self._buckets("nccl", document), deadline_s=self._bucket_s,
            progress=lambda: self._reports.append(BroadcastReport(epoch, BroadcastStage.PROGRESS)),
        )
        self._reports.append(BroadcastReport(epoch, BroadcastStage.SENT, seconds=time.monotonic() - began))

    def _attempt(self, epoch: int, work: Callable[[Broadcaster], None]) -> None:
        if epoch in self._over:
            return
        broadcaster = self._broadcaster
        assert broadcaster is not None, "the hub asks for epochs only where nccl is set"
        try:
            work(broadcaster)
        except Exception as error:  # a library may raise anything; the hub must be told
            if isinstance(error, torch.OutOfMemoryError):
                log.error("the GPU has no memory left: %s", error)
                return self._end(EXIT_NO_MEMORY)
            if not isinstance(error, StreamrlError):
                log.exception("epoch %d failed", epoch)
            if isinstance(error, CommunicatorStuck) or broadcaster.threads.num_abandoned:
                log.error("a call neither returns nor can be aborted: %s", error)
                return self._end(EXIT_STUCK)
            self._reports.append(BroadcastReport(epoch, BroadcastStage.FAILED, error=str(error)[:2000]))

    def _end(self, status: int) -> None:
        self._exit_status = status
        self._ends.set()

    def _close(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.stop()
        self._work.put(None)
        self._files.shutdown(wait=False, cancel_futures=True)
        self._thread.join(timeout=1.0)
        if self._slots is not None:
            self._slots.close()
        self._socket.close()
