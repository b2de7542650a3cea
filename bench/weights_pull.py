"""How fast is a verified pull, next to the same bytes through bare sockets? Part of `bench.weights`.

The serving side is a process of its own, as the hub is. It answers PULLs out of a mapped document at one port, and at
another sends slices of the very same document to any receiver, without any check. The receiver takes turns: a verified
pull, then bare messages, each copied into place.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from streamrl.messages import TO_WEIGHTS, Layout, Limits, Manifest, Pull
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.document import HEADER_BYTES, DocumentMemory
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.pull.client import ZmqReceiver
from streamrl.weights.transport import receive

TOKEN = bytes(16)
CHUNK_BYTES = Limits().chunk_bytes
WARM_UP = 3
"""Rounds before the clock: until then every document is the first in its memory."""


def serve_forever() -> None:
    """The serving process: a line of hex in (path, manifest, layout), the two ports out; ends with its stdin."""
    line = bytes.fromhex(sys.stdin.readline())
    path, manifest, layout = msgspec.msgpack.decode(line, type=tuple[str, Manifest, Layout])
    server = ChunkServer(pull_token=TOKEN)
    server.add(manifest, path, layout)
    body = memoryview(Path(path).read_bytes())[HEADER_BYTES:]
    context = zmq.Context()
    sockets = [context.socket(zmq.ROUTER) for _ in range(2)]
    print(*(socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets), flush=True)
    threading.Thread(target=_answer_pulls, args=(sockets[0], server), daemon=True).start()
    threading.Thread(target=_send_slices, args=(sockets[1], body), daemon=True).start()
    sys.stdin.read()


def _answer_pulls(socket: zmq.Socket, server: ChunkServer) -> None:
    decoder = Decoder(TO_WEIGHTS)
    while True:
        peer, frame = socket.recv_multipart()
        pull = decoder.decode(frame)
        assert isinstance(pull, Pull)
        chunk, part = server.answer(pull)
        socket.send_multipart([peer, encode(chunk), part], copy=False)


def _send_slices(socket: zmq.Socket, body: memoryview) -> None:
    while True:
        peer, frame = socket.recv_multipart()
        start = int(frame) * CHUNK_BYTES
        socket.send_multipart([peer, b"", body[start : start + CHUNK_BYTES]], copy=False)


@contextmanager
def serving(path: Path, manifest: Manifest, layout: Layout) -> Iterator[list[str]]:
    """The two endpoints: verified pulls, bare slices."""
    command = [sys.executable, "-m", "bench.weights", "--server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.msgpack.encode((str(path), manifest, layout)).hex() + "\n")
        process.stdin.flush()
        yield [f"tcp://127.0.0.1:{port}" for port in process.stdout.readline().split()]
    finally:
        process.stdin.close()
        process.wait(timeout=60)


def bare_pull(context: zmq.Context, endpoint: str, count: int, window: int, target: memoryview) -> float:
    """Seconds for `count` slices, `window` in flight, each copied into `target`; nothing is checked."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    started = time.perf_counter()
    for index in range(min(window, count)):
        socket.send(b"%d" % index)
    for index in range(count):
        payload = socket.recv_multipart(copy=False)[1].buffer
        target[index * CHUNK_BYTES : index * CHUNK_BYTES + len(payload)] = payload
        if index + window < count:
            socket.send(b"%d" % (index + window))
    seconds = time.perf_counter() - started
    socket.close(linger=0)
    return seconds


def pull_rounds(path: Path, manifest: Manifest, layout: Layout, repeats: int) -> tuple[list[float], list[float]]:
    """MB/s of verified pulls, and of bare slices."""
    context, limits = zmq.Context(), Limits()
    nbytes = sum(layout.bucket_bytes)
    count = -(-nbytes // CHUNK_BYTES)
    target = memoryview(bytearray(nbytes))
    pulled, bare = [], []
    with serving(path, manifest, layout) as (ours, raw):
        held, memory = None, DocumentMemory()  # as an actor has it: the last version stays until the next one is there
        for _ in range(repeats + WARM_UP):
            receiver = ZmqReceiver(ours, context, pull_token=TOKEN, limits=limits, memory=memory)
            started = time.perf_counter()
            found = receive(
                receiver, manifest, layout, cancelled=threading.Event(), deadline=time.monotonic() + 60
            ).document
            pulled.append(nbytes / (time.perf_counter() - started) / 1e6)
            held = found
            assert held.nbytes == nbytes
            bare.append(nbytes / bare_pull(context, raw, count, limits.pull_window, target) / 1e6)
    assert bytes(target) == Path(path).read_bytes()[HEADER_BYTES:], "the bare slices are not the document"
    context.destroy(linger=0)
    return pulled[WARM_UP:], bare[WARM_UP:]
