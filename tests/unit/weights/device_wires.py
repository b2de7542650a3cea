"""Wires for the conformance suite of the ways from GPU to GPU, with stand-ins where a GPU would be."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zmq

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest, NcclTicket, Offer, VersionRef
from streamrl.weights.gpu.broadcast import Broadcaster, BroadcastMember, BroadcastReceiver
from streamrl.weights.gpu.device_document import DeviceDocument
from streamrl.weights.gpu.ipc import IpcBufferReader, IpcBufferReceiver, IpcBufferServer
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_ranges, document_nbytes, make_manifest
from tests.fakes.communicator import FakeLibrary
from tests.fakes.device_memory import FakeDeviceMemory
from tests.unit.weights.fold_reference import fold128_numpy
from tests.unit.weights.host_wires import ReceivingWire

torch.set_num_threads(1)


def device_manifest(layout: Layout, ref: VersionRef, parent: VersionRef | None, body: bytes) -> Manifest:
    digests = [fold128_numpy(body[start:end]) for start, end in bucket_ranges(layout)]
    return make_manifest(layout, ref, parent, digests, DIGEST_FOLD128)


class Memory:
    """A document's buckets out of plain bytes; `upto` cuts it off, as a writer that dies would."""

    def __init__(self, layout: Layout, body: bytes, upto: int | None = None) -> None:
        self.layout, self.body, self.upto = layout, bytearray(body), upto
        self.before_fill: Callable[[int], None] = lambda index: None

    def fill(self, index: int, out: torch.Tensor) -> None:
        self.before_fill(index)
        start, end = bucket_ranges(self.layout)[index]
        if self.upto is not None and end > self.upto:
            raise WeightsError("the writer died")
        out[: end - start].numpy()[:] = np.frombuffer(bytes(self.body[start:end]), dtype=np.uint8)


class Shelf(ReceivingWire):
    """What both wires share: the newest two documents."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.patience_s = 12.0
        self.documents: dict[VersionRef, Memory] = {}
        self._newest: VersionRef | None = None

    def publish(self, ref: VersionRef, body: bytes) -> Manifest:
        assert len(body) == document_nbytes(self.layout)
        manifest = device_manifest(self.layout, ref, self._newest, body)
        self.documents[ref] = Memory(self.layout, body)
        self._newest = ref
        for old in sorted(self.documents)[:-2]:
            del self.documents[old]
        return manifest

    def flip(self, offset: int) -> None:
        assert self._newest is not None
        self.documents[self._newest].body[offset] ^= 0x40

    def tear(self, ref: VersionRef, body: bytes) -> Manifest:
        self.documents[ref] = Memory(self.layout, body, upto=len(body) // 2)
        return device_manifest(self.layout, ref, self._newest, body)


class FakeBroadcastWire(Shelf):
    """Sender and member as they are, over FakeCommunicators; this class plays the hub."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._root_library, self._members_library = FakeLibrary(), FakeLibrary()
        self._broadcaster = Broadcaster(self._root_library, "cpu")
        self._epoch = 0
        self._ticket: NcclTicket | None = None  # of the present epoch, which has brought this version last
        self._last = VersionRef(0, 0)
        self._thread: threading.Thread | None = None
        self._member = self._new_member()

    def _new_member(self) -> BroadcastMember:
        return BroadcastMember(self._members_library, "cpu", lambda state: None)

    def _serve(self, ref: VersionRef, ticket: NcclTicket, form: bool) -> None:
        try:
            if form:
                self._broadcaster.form(ticket.epoch, 2, ticket.unique_id, 20.0)
            if ref in self.documents:
                self._broadcaster.send(ref, self.documents[ref], deadline_s=5.0)
        except WeightsError:
            self._ticket = None
            self._broadcaster.close()

    def receive(
        self, manifest: Manifest, *, layout: Layout | None = None, cancelled: threading.Event | None = None,
        deadline_s: float = 20.0,
    ) -> DeviceDocument:
        if self._thread is not None:  # the hub sends one version after the other
            self._thread.join()
        ticket, form = self._ticket, False
        if ticket is None or manifest.ref < self._last:
            self._epoch, form = self._epoch + 1, True
            ticket = self._ticket = NcclTicket(self._epoch, self._broadcaster.name(), 2, 1, 20.0, 5.0)
        if form or manifest.ref != self._last:
            self._thread = threading.Thread(target=self._serve, args=(manifest.ref, ticket, form), daemon=True)
            self._thread.start()
        self._last = manifest.ref
        offer = Offer("nccl", "", document_nbytes(self.layout), manifest=manifest, nccl=ticket)
        try:
            return self._received(BroadcastReceiver(offer, self._member), manifest, layout, cancelled, deadline_s)
        except WeightsError:
            if cancelled is None:
                self._broadcaster.stop()
                self._ticket = None
            raise

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._member.close()
        self._member, self._ticket = self._new_member(), None

    def midway(self, action: Callable[[], None]) -> None:
        count = [0]

        def look(rank: int, nbytes: int) -> None:
            count[0] += 1
            if count[0] == 3:  # the header, the first bucket, and now
                self._members_library.on_broadcast = lambda rank, nbytes: None
                action()

        self._members_library.on_broadcast = look

    def die(self) -> None:
        guard = self._broadcaster._guard
        assert guard is not None and guard._inner is not None
        guard._inner.abort()  # what the system does with the sockets of a dead process

    def close(self) -> None:
        self._broadcaster.stop()
        self._member.close()
        self._broadcaster.close()
        if self._thread is not None:
            self._thread.join(timeout=10)


class FakeSlotWire(Shelf):
    """Server and reader as they are, over slots in a file; two buckets at a time, as on a GPU."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        super().__init__(layout)
        self._folder, self._home = folder, tempfile.TemporaryDirectory(prefix="slots-")
        self._context = zmq.Context()
        self.server = IpcBufferServer(
            FakeDeviceMemory(folder), self._context, f"ipc://{self._home.name}/slots",
            slot_bytes=max(layout.bucket_bytes), deadline_s=5.0,
        )
        self._midway: Callable[[], None] | None = None
        self.join()

    def publish(self, ref: VersionRef, body: bytes) -> Manifest:
        manifest = super().publish(ref, body)
        self._pass_on(ref)
        return manifest

    def tear(self, ref: VersionRef, body: bytes) -> Manifest:
        manifest = super().tear(ref, body)
        self._pass_on(ref)
        return manifest

    def _pass_on(self, ref: VersionRef) -> None:
        self.documents[ref].before_fill = self._look
        self.server.publish(ref, self.documents[ref])

    def _look(self, index: int) -> None:
        if index == 2 and (action := self._midway) is not None:
            self._midway = None
            action()

    def offer(self, manifest: Manifest) -> Offer:
        nbytes = document_nbytes(self.layout)
        return Offer("ipc", self.server.endpoint, nbytes, manifest=manifest, slots=self.server.ticket)

    def receive(
        self, manifest: Manifest, *, layout: Layout | None = None, cancelled: threading.Event | None = None,
        deadline_s: float = 20.0,
    ) -> DeviceDocument:
        if manifest.ref in self.documents and manifest.ref != max(self.documents):  # the hub has forgotten the torn one
            del self.documents[max(self.documents)]
            self._restart()
            self._pass_on(manifest.ref)
        receiver = IpcBufferReceiver(self.offer(manifest), self.reader)
        return self._received(receiver, manifest, layout, cancelled, deadline_s)

    def _restart(self) -> None:
        self.server.close()
        self.server = IpcBufferServer(
            FakeDeviceMemory(self._folder), self._context, f"ipc://{self._home.name}/{time.monotonic_ns()}",
            slot_bytes=max(self.layout.bucket_bytes), deadline_s=5.0,
        )

    def join(self) -> None:
        self.reader = IpcBufferReader(FakeDeviceMemory(self._folder), self._context)

    def midway(self, action: Callable[[], None]) -> None:
        self._midway = action

    def die(self) -> None:
        self.server._stopping.set()

    def close(self) -> None:
        self.server.close()
        self._context.destroy(linger=0)
        self._home.cleanup()
