"""Small real documents, a real weight socket, and a network that flips bytes and cuts connections."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from streamrl.errors import ContentError
from streamrl.messages import TO_WEIGHTS, Chunk, Layout, Limits, Manifest, Pull, VersionRef
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.manifest import document_nbytes, make_layout, make_manifest
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.shm.transport import ShmPublisher

TOKEN = b"0123456789abcdef"
SPECS = (
    ("embed", "float32", (33, 5)), ("scale", "float32", ()), ("mlp.up", "float32", (7, 41)), ("norm", "float32", (19,)),
)


def random_bytes(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def layout() -> Layout:
    """1,888 bytes in five buckets of at most 400."""
    return make_layout(SPECS, bucket_bytes=400)


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[ShmPublisher]:
    with ShmPublisher(tmp_path / "documents", "test-run") as publisher:
        yield publisher


Publish = Callable[..., tuple[Manifest, Path, bytes]]


@pytest.fixture
def publish(shm: ShmPublisher) -> Publish:
    """publish(layout, version, seed=...) -> (manifest, path, body): random bytes, really written."""

    def write(layout: Layout, version: int, *, epoch: int = 1, seed: int = 0) -> tuple[Manifest, Path, bytes]:
        body = random_bytes(document_nbytes(layout), seed or 1000 * epoch + version)
        writer = shm.begin(VersionRef(epoch, version), layout)
        writer.append(body)
        manifest = make_manifest(layout, VersionRef(epoch, version), None, writer.digests())
        return manifest, writer.commit(), body

    return write


Tamper = Callable[[int, Chunk, bytes], "tuple[Chunk, bytes] | None"]


class WeightRouter:
    """The hub's weight socket in small: a ROUTER thread round a ChunkServer.

    `tamper(count, chunk, payload)` may change an answer, or swallow it by returning None.
    """

    def __init__(self, context: zmq.Context, server: ChunkServer, tamper: Tamper | None = None) -> None:
        self.server, self.refused, self.answered = server, 0, 0
        self._tamper = tamper
        self._socket = context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weight-router")
        self._thread.start()

    def _serve(self) -> None:
        decoder = Decoder(TO_WEIGHTS)
        while not self._stop.is_set():
            job = self.server.deltas.next_job()
            if not self._socket.poll(20 if job is None else 0):
                if job is not None:
                    job.step()
                continue
            peer, frame = self._socket.recv_multipart()
            pull = decoder.decode(frame)
            assert isinstance(pull, Pull)
            try:
                answer: tuple[Chunk, bytes | memoryview] | None = self.server.answer(pull)
            except ContentError:
                self.refused += 1
                continue
            assert answer is not None
            if self._tamper is not None:
                answer = self._tamper(self.answered, answer[0], bytes(answer[1]))
            self.answered += 1
            if answer is not None:
                self._socket.send_multipart([peer, encode(answer[0]), answer[1]], copy=False)
        self._socket.close(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


class FaultyWire:
    """A TCP proxy that counts the bytes going back to the client, flips those at `flip_at`, cuts at `cut_at`."""

    def __init__(self, port: int, *, flip_at: tuple[int, ...] = (), cut_at: tuple[int, ...] = ()) -> None:
        self._target, self._flip_at, self._cut_at = port, set(flip_at), sorted(cut_at)
        self.flipped, self.cut, self._count = 0, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        self._closing = False
        threading.Thread(target=self._accept, daemon=True, name="wire").start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, faulty: bool) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(self._disturb(data) if faulty else data)
        except OSError:
            pass
        for end in (source, sink):
            shut(end)

    def _disturb(self, data: bytes) -> bytes:
        start, self._count = self._count, self._count + len(data)
        if self._cut_at and self._count >= self._cut_at[0]:
            self._cut_at.pop(0)
            self.cut += 1
            raise ConnectionResetError
        changed = bytearray(data)
        for position in [at for at in self._flip_at if start <= at < self._count]:
            changed[position - start] ^= 0x40
            self._flip_at.remove(position)
            self.flipped += 1
        return bytes(changed)

    def close(self) -> None:
        for end in self._open:
            shut(end)


def shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def serve(context: zmq.Context) -> Iterator[Callable[..., WeightRouter]]:
    """serve(server, tamper=None) -> WeightRouter, closed at the end."""
    routers: list[WeightRouter] = []

    def start(server: ChunkServer, tamper: Tamper | None = None) -> WeightRouter:
        routers.append(WeightRouter(context, server, tamper))
        return routers[-1]

    yield start
    for router in routers:
        router.close()


@pytest.fixture
def faulty_wire() -> Iterator[Callable[..., FaultyWire]]:
    """faulty_wire(port, flip_at=..., cut_at=...) -> FaultyWire, closed at the end."""
    wires: list[FaultyWire] = []

    def start(port: int, **faults: tuple[int, ...]) -> FaultyWire:
        wires.append(FaultyWire(port, **faults))
        return wires[-1]

    yield start
    for wire in wires:
        wire.close()


@pytest.fixture
def limits() -> Limits:
    """Chunks of 64 bytes, four in flight, pulled again after 0.3 s of silence."""
    return Limits(chunk_bytes=64, pull_window=4, chunk_timeout_s=0.3)


@pytest.fixture
def token() -> bytes:
    return TOKEN
