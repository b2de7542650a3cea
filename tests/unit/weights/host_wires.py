"""Wires for the conformance suite: shared memory, and pulls over real sockets, with or without deltas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash
import zmq

from streamrl.messages import Chunk, InstallSource, Layout, Limits, Manifest, Offer, VersionRef
from streamrl.weights.delta import DeltaBase
from streamrl.weights.document import HEADER_BYTES, Document
from streamrl.weights.manifest import bucket_digest, bucket_ranges, make_manifest
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.pull.client import ZmqReceiver
from streamrl.weights.pull.host_cache import HostShare
from streamrl.weights.shm.transport import ShmPublisher, ShmReceiver, shm_offer
from streamrl.weights.transport import Receiver, receive
from tests.unit.weights.conftest import TOKEN, WeightRouter

LIMITS = Limits(chunk_bytes=64, pull_window=4, chunk_timeout_s=0.3)


class ReceivingWire:
    """The fetch of every wire, with whatever receiver it has."""

    layout: Layout
    source: InstallSource | None = None

    def _received(self, receiver: Receiver, manifest, layout, cancelled, deadline_s):
        fetched = receive(
            receiver, manifest, layout or self.layout, cancelled=cancelled or threading.Event(),
            deadline=time.monotonic() + deadline_s,
        )
        self.source = fetched.source
        return fetched.document


class HostWire(ReceivingWire):
    """Documents in shared memory, as both transports of a host have them."""

    patience_s = 1.0

    def __init__(self, layout: Layout, folder: Path) -> None:
        self.layout = layout
        self._shm = ShmPublisher(folder / "documents", "conformance")
        self._parent: VersionRef | None = None
        self._action: Callable[[], None] | None = None
        self._newest: tuple[Manifest, Path] | None = None

    def publish(self, ref: VersionRef, body: bytes) -> Manifest:
        writer = self._shm.begin(ref, self.layout)
        writer.append(body)
        manifest = make_manifest(self.layout, ref, self._parent, writer.digests())
        self._newest, self._parent = (manifest, writer.commit()), ref
        return manifest

    def tear(self, ref: VersionRef, body: bytes) -> Manifest:
        self._shm.begin(ref, self.layout).append(body[: len(body) // 2])
        digests = [bucket_digest(body[start:end]) for start, end in bucket_ranges(self.layout)]
        return make_manifest(self.layout, ref, self._parent, digests)

    def midway(self, action: Callable[[], None]) -> None:
        self._action = action

    def _act(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def join(self) -> None:
        pass

    def die(self) -> None:
        for path in self._shm.directory.iterdir():
            path.unlink()

    def close(self) -> None:
        self._shm.close()


class ActingEvent(threading.Event):
    """Lets something happen when the receiver looks whether it was cancelled."""

    def __init__(self, real: threading.Event, act: Callable[[], None]) -> None:
        super().__init__()
        self._real, self._act = real, act

    def is_set(self) -> bool:
        self._act()
        return self._real.is_set()


class ShmWire(HostWire):
    def receive(self, manifest, *, layout=None, cancelled=None, deadline_s=20.0) -> Document:
        path = self._shm.directory / f"w.{manifest.ref.learner_epoch}.{manifest.ref.version}"
        offer = shm_offer(path) if path.exists() else Offer("shm", str(path), 1, bytes(16))
        cancelled = ActingEvent(cancelled or threading.Event(), self._act)
        return self._received(ShmReceiver(offer), manifest, layout, cancelled, deadline_s)

    def flip(self, offset: int) -> None:
        assert self._newest is not None
        with open(self._newest[1], "r+b") as file:
            file.seek(HEADER_BYTES + offset)
            wrong = file.read(1)[0] ^ 0x10
            file.seek(HEADER_BYTES + offset)
            file.write(bytes([wrong]))


class ZmqWire(HostWire):
    """A real ROUTER and a real DEALER over loopback."""

    patience_s = 1.5

    def __init__(self, layout: Layout, folder: Path, *, delta_max_ratio: float = 0.0) -> None:
        super().__init__(layout, folder)
        self._context = zmq.Context()
        self.server = ChunkServer(pull_token=TOKEN, delta_max_ratio=delta_max_ratio)
        self.delta_base = DeltaBase()
        self._dead, self._moved = False, 0
        self._wrong: tuple[VersionRef, int, int] | None = None
        self.tamper: Callable[[Chunk, bytes], tuple[Chunk, bytes]] = lambda chunk, payload: (chunk, payload)
        self.moved_bytes = 0
        self._router = WeightRouter(self._context, self.server, self._tamper)

    def publish(self, ref: VersionRef, body: bytes) -> Manifest:
        manifest = super().publish(ref, body)
        self.server.add(manifest, self._newest[1], self.layout)
        return manifest

    def receive(self, manifest, *, layout=None, cancelled=None, deadline_s=20.0) -> Document:
        self._moved = 0
        puller = ZmqReceiver(
            self._router.endpoint, self._context, pull_token=TOKEN, limits=LIMITS, delta_base=self.delta_base,
            parent=self.server.deltas.parent_of(manifest.ref),
        )
        document = self._received(self._at_the_actor(puller), manifest, layout, cancelled, deadline_s)
        self.moved_bytes = puller.moved_bytes
        self.delta_base.keep(document)
        return document

    def _at_the_actor(self, puller: ZmqReceiver) -> Receiver:
        return puller

    def join(self) -> None:
        self.delta_base = DeltaBase()

    def flip(self, offset: int) -> None:
        bucket, rest = divmod(offset, self.layout.bucket_bytes[0])
        self._wrong = (self._newest[0].ref, bucket, rest)

    def _tamper(self, count: int, chunk: Chunk, payload: bytes) -> tuple[Chunk, bytes] | None:
        self._moved += 1
        if self._moved > 3:
            self._act()
        if self._dead:
            return None
        if self._wrong is not None and self._wrong[:2] == (chunk.target, chunk.bucket):
            at = self._wrong[2] - chunk.offset
            if 0 <= at < len(payload):
                payload = payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]
                chunk = msgspec.structs.replace(chunk, digest=xxhash.xxh3_64_intdigest(payload))
        return self.tamper(chunk, payload)

    def impostor(self, body: bytes) -> Document:
        """A verified document under the newest version's number, with other bytes."""
        ref = self._newest[0].ref
        digests = [bucket_digest(body[start:end]) for start, end in bucket_ranges(self.layout)]
        return Document(bytearray(body), make_manifest(self.layout, ref, None, digests), self.layout).verify()

    def die(self) -> None:
        super().die()
        self._dead = True

    def close(self) -> None:
        self._router.close()
        self._context.destroy(linger=0)
        super().close()


class ShareWire(ZmqWire):
    """Actors of one host that share what one of them pulled; each `join` is another actor, the old ones stay."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        super().__init__(layout, folder)
        self._root = folder / "host"
        self._root.mkdir()
        self._members = [HostShare("conformance", self._root)]

    def _at_the_actor(self, puller: ZmqReceiver) -> Receiver:
        return self._members[-1].around(puller)

    def join(self) -> None:
        super().join()
        self._members.append(HostShare("conformance", self._root))

    def close(self) -> None:
        for member in self._members:
            member.close()
        assert not list(self._root.iterdir())
        super().close()
