"""Publishes that are interrupted: a writer, a server or a reader is killed at a random byte or a random moment.

Every round forks a process that does one of

    writer   writes a version into shared memory, announces it, and dies inside the next one (at byte n, between the
             last byte and the rename, or wherever a timer finds it)
    server   answers PULLs, full or delta, and after n bytes of payload sends half a chunk and dies (or goes on)
    reader   fetches a version, and a timer kills it somewhere

and then looks at the survivors: whatever is served must be, byte for byte, one version that was published; whatever has
a final name must be whole; what a reader held before must be as it was. A round never asks a digest whether that is
so: the bytes of every version can be worked out from its number.

Run: python -m bench.interrupts [--count 1000] [--seed 0]      prints one line of JSON; exit 1 if a rule was broken
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import zmq

from streamrl.errors import WeightsError
from streamrl.messages import TO_WEIGHTS, Limits, Manifest, Offer, Pull, VersionRef
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.delta import DeltaBase
from streamrl.weights.document import Document
from streamrl.weights.manifest import bucket_digest, bucket_ranges, document_nbytes, make_layout, make_manifest
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.pull.client import ZmqReceiver
from streamrl.weights.shm.transport import ShmPublisher, ShmReceiver, shm_offer
from streamrl.weights.transport import receive as fetch

LAYOUT = make_layout([("embed", "bfloat16", (9000,)), ("rest", "bfloat16", (11501,))], bucket_bytes=10_000)
NBYTES = document_nbytes(LAYOUT)
LIMITS = Limits(chunk_bytes=4096, pull_window=4, chunk_timeout_s=0.03)
TOKEN = bytes(16)
PATIENCE_S = 0.25
_BASE = np.frombuffer(random.Random(7).randbytes(NBYTES - NBYTES % 2), np.uint16)


def body_of(version: int) -> bytes:
    """The bytes of a version; of two of them about one word in fifty differs."""
    rng = np.random.default_rng(version)
    words = _BASE.copy()
    words[rng.integers(0, len(words), len(words) // 100)] = rng.integers(0, 65536, len(words) // 100)
    return words.tobytes() + bytes(NBYTES % 2)


def manifest_of(version: int) -> Manifest:
    body = body_of(version)
    digests = [bucket_digest(body[start:end]) for start, end in bucket_ranges(LAYOUT)]
    return make_manifest(LAYOUT, VersionRef(1, version), VersionRef(1, version - 1) if version else None, digests)


def publish(shm: ShmPublisher, version: int) -> Path:
    writer = shm.begin(VersionRef(1, version), LAYOUT)
    writer.append(body_of(version))
    writer.digests()
    return writer.commit()


def forked(work: Callable[[int], None], *, kill_within_s: float | None = None) -> tuple[int, int]:
    """(process, a pipe to read from) of a child that runs `work(pipe to write to)`; a timer may kill it anywhere."""
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if kill_within_s is not None:
                signal.setitimer(signal.ITIMER_REAL, kill_within_s)  # its default action is to end the process
            work(write_end)
            os._exit(0)
        finally:
            os._exit(3)
    os.close(write_end)
    return pid, read_end


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Reader:
    """An actor's state between rounds: the version that it serves, and the base of deltas."""

    def __init__(self) -> None:
        self.document: Document | None = None
        self.version = -1
        self.delta_base = DeltaBase()

    def take(self, document: Document) -> None:
        self.document, self.version = document, document.manifest.ref.version
        self.delta_base.keep(document)

    def intact(self) -> bool:
        return self.document is None or bytes(self.document.view(0, NBYTES)) == body_of(self.version)


class Rounds:
    """Interrupts in one folder; `outcomes` counts what survivors found, `broken` what must never be."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self._context = zmq.Context()
        self._reader, self._version = Reader(), 0
        self.outcomes: Counter[str] = Counter()
        self.broken: list[str] = []

    def run(self, count: int) -> None:
        kinds = [self.writer, self.writer, self.server, self.reader]
        for index in range(count):
            kinds[index % len(kinds)]()
            if not self._reader.intact():
                self.broken.append(f"round {index}: the reader's version {self._reader.version} changed under it")
        self._context.destroy(linger=0)

    def _fetch(self, kind: str, version: int, receive: Callable[[Manifest], Document]) -> None:
        try:
            document = receive(manifest_of(version))
        except WeightsError:
            self.outcomes[f"{kind} refused"] += 1
            return
        self.outcomes[f"{kind} whole"] += 1
        if bytes(document.view(0, NBYTES)) != body_of(version):
            self.broken.append(f"{kind}: version {version} was served with other bytes")
        if version > self._reader.version:
            self._reader.take(document)

    def _receive_shm(self, path: Path, manifest: Manifest) -> Document:
        offer = shm_offer(path) if path.exists() else Offer("shm", str(path), NBYTES, bytes(16))
        deadline = time.monotonic() + PATIENCE_S
        return fetch(ShmReceiver(offer), manifest, LAYOUT, cancelled=threading.Event(), deadline=deadline).document

    # --- a writer dies ----------------------------------------------------------------------------------------------

    def writer(self) -> None:
        self._version += 2
        folder, first, torn = self._folder / "writer", self._version, self._version + 1
        cut = self._rng.choice([0, NBYTES, self._rng.randint(0, NBYTES), self._rng.randint(0, NBYTES)])
        renames = cut == NBYTES and self._rng.random() < 0.5
        timer = self._rng.uniform(0.0005, 0.012) if self._rng.random() < 0.4 else None

        def write(pipe: int) -> None:
            shm = ShmPublisher(folder, "interrupts")
            publish(shm, first)
            os.write(pipe, b"announced")
            writer = shm.begin(VersionRef(1, torn), LAYOUT)
            writer.append(body_of(torn)[:cut])
            if renames:
                writer.commit()
            die()

        pid, pipe = forked(write, kill_within_s=timer)
        announced = os.read(pipe, 64) == b"announced"  # from here on reader and writer run at the same time
        if announced:
            self._fetch("shm beside a writer", first, lambda m: self._receive_shm(folder / f"w.1.{first}", m))
        os.waitpid(pid, 0)
        os.close(pipe)
        for kind, name in (("shm after a writer", f"w.1.{torn}"), ("an unfinished file", f"w.1.{torn}.tmp")):
            if (folder / name).exists():
                self._fetch(kind, torn, lambda manifest, name=name: self._receive_shm(folder / name, manifest))
        self._check_folder(folder)

    def _check_folder(self, folder: Path) -> None:
        for path in folder.glob("w.1.*"):
            if path.suffix == ".tmp":
                continue
            self.outcomes["documents found"] += 1
            body = path.read_bytes()[64:]
            if body != body_of(int(path.suffix[1:])):
                self.broken.append(f"{path.name} has its final name and other bytes")

    # --- a server dies ----------------------------------------------------------------------------------------------

    def server(self) -> None:
        self._version += 2
        parent, target = self._version, self._version + 1
        mode = "delta" if self._rng.random() < 0.5 else "full"
        total = NBYTES // 16 if mode == "delta" else NBYTES
        cut, dies = self._rng.randint(0, int(1.2 * total)), self._rng.random() < 0.7
        with ShmPublisher(self._folder / "server", "interrupts") as shm:
            paths = [(manifest_of(version), publish(shm, version)) for version in (parent, target)]
            self._reader.delta_base = DeltaBase()  # a restarted one, that trusts deltas
            self._reader.take(Document.map_file(paths[0][1], paths[0][0], LAYOUT).verify())
            pid, pipe = forked(lambda out: serve(out, paths, cut, dies))
            port = os.read(pipe, 16).decode()
            receiver = ZmqReceiver(
                f"tcp://127.0.0.1:{port}", self._context, pull_token=TOKEN, limits=LIMITS,
                delta_base=self._reader.delta_base if mode == "delta" else None,
                parent=VersionRef(1, parent) if mode == "delta" else None,
            )
            kind = f"zmq {mode} from a {'dying' if dies else 'stumbling'} server"
            self._fetch(kind, target, lambda manifest: fetch(
                receiver, manifest, LAYOUT, cancelled=threading.Event(), deadline=time.monotonic() + PATIENCE_S
            ).document)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)

    # --- a reader dies ----------------------------------------------------------------------------------------------

    def reader(self) -> None:
        self._version += 1
        with ShmPublisher(self._folder / "reader", "interrupts") as shm:
            path, manifest = publish(shm, self._version), manifest_of(self._version)

            def read(pipe: int) -> None:
                document = self._receive_shm(path, manifest)
                os.write(pipe, b"serves" if bytes(document.view(0, NBYTES)) == body_of(self._version) else b"broken")

            pid, pipe = forked(read, kill_within_s=self._rng.uniform(0.0001, 0.003))
            os.waitpid(pid, 0)
            word = os.read(pipe, 16)
            os.close(pipe)
            self.outcomes[f"a dying reader {word.decode() or 'served nothing'}"] += 1
            if word == b"broken":
                self.broken.append(f"a reader served version {self._version} with other bytes")
            self._fetch("shm after a reader", self._version, lambda m: self._receive_shm(path, m))


def serve(pipe: int, documents: list[tuple[Manifest, Path]], cut: int, dies: bool) -> None:
    """Answer PULLs; the chunk in which `cut` bytes of payload have left is sent short, and is the last if it `dies`."""
    server = ChunkServer(pull_token=TOKEN, delta_max_ratio=0.5)
    for manifest, path in documents:
        server.add(manifest, path, LAYOUT)
    socket = zmq.Context().socket(zmq.ROUTER)
    os.write(pipe, str(socket.bind_to_random_port("tcp://127.0.0.1")).encode())
    decoder, sent = Decoder(TO_WEIGHTS), 0
    while True:
        while (job := server.deltas.next_job()) is not None:
            job.step()
        peer, frame = socket.recv_multipart()
        pull = decoder.decode(frame)
        assert isinstance(pull, Pull)
        chunk, payload = server.answer(pull)
        left, sent = cut - sent, sent + len(payload)
        if sent > cut >= sent - len(payload):
            socket.send_multipart([peer, encode(chunk), bytes(payload[:left])])
            if dies:
                time.sleep(0.002)  # let the last bytes leave: what the reader makes of them is the question
                die()
            continue
        socket.send_multipart([peer, encode(chunk), payload])


def run_rounds(count: int, seed: int) -> Rounds:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        rounds = Rounds(Path(folder), seed)
        rounds.run(count)
        return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of what is done to them, receivers report every single one
    started = time.perf_counter()
    rounds = run_rounds(options.count, options.seed)
    found = {
        "count": options.count, "broken": rounds.broken, "outcomes": dict(sorted(rounds.outcomes.items())),
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(msgspec.to_builtins(found)))
    return 1 if rounds.broken else 0


if __name__ == "__main__":
    sys.exit(main())
