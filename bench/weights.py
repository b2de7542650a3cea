"""How long from "publish" until an actor holds verified weights, and how fast is a pull?

publish -> verified visible: the learner's `Publisher` gathers, digests and commits a document; every receiver process
maps it, verifies all buckets and says so over a pipe. The clock runs in the publishing process, from the call of
`publish` to the last receiver's word. Beside it, in the same run and with the same bytes: one copy of the document in
memory and one digest of it, which nobody can do without. Between two rounds the publisher may finish what it does
behind a commit (unlink the retired document, make room for the next), as it does while a learner trains.

pull: a receiver takes the same document by PULL and CHUNK over loopback, digests included; beside it the same number of
bytes in messages of the same size through a bare DEALER and ROUTER without any check. The two alternate.

Before any clock starts, the received tensors are compared with the parameters bit for bit.

Run: python -m bench.weights [--mib 64] [--repeats 15] [--quick] [--check]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
import xxhash
import zmq

from bench.record import exit_status, record, shared_arguments
from learner.publish import PublishedVersion, Publisher
from streamrl.codec import Decoder, encode
from streamrl.messages import TO_WEIGHTS, Layout, Limits, Manifest, Offer, Pull, VersionRef
from streamrl.weights.chunks import ChunkServer
from streamrl.weights.rundir import document_directory
from streamrl.weights.shm import ShmPublisher, shm_offer
from streamrl.weights.source import WeightSource
from streamrl.weights.zmq import ZmqReceiver

GOALS_MS = {1: 25.0, 4: 70.0}
WARM_UP = 4
"""Rounds before the clock: the first documents make the machine find memory for the first time."""


def make_parameters(mib: int, seed: int) -> list[tuple[str, torch.nn.Parameter]]:
    """float32, a few large tensors and many small ones, `mib` MiB in all."""
    generator = torch.Generator().manual_seed(seed)
    total, sizes = (mib << 20) // 4, []
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, 1024 if len(sizes) % 4 else 1 << 20))
    return [
        (f"layers.{i}.weight", torch.nn.Parameter(torch.randn(size, generator=generator)))
        for i, size in enumerate(sizes)
    ]  # fmt: skip


# --- receivers, each a process of its own ------------------------------------------------------------------------


def receive_for_ever() -> None:
    """The receiving process: a line of hex in (layout, then manifest and offer), a line out when all is verified."""
    layout = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Layout)
    source = WeightSource(zmq.Context())
    print("ready", flush=True)
    for line in sys.stdin:
        manifest, offer = msgspec.msgpack.decode(bytes.fromhex(line), type=tuple[Manifest, Offer])
        fetched = source.fetch(manifest, [offer], layout)
        print(f"{fetched.transfer_s} {fetched.verify_s}", flush=True)
        del fetched  # unmapped now, not inside the next round


class ReceiverProcess:
    def __init__(self, layout: Layout) -> None:
        command = [sys.executable, "-m", "bench.weights", "--receiver"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tell(msgspec.msgpack.encode(layout).hex())
        assert self.hear() == "ready"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)


def visible_rounds(
    publisher: Publisher, receivers: Sequence[ReceiverProcess], refs: Iterator[VersionRef], repeats: int,
    settle: Callable[[], None],
) -> dict[str, list[float]]:
    """Milliseconds, by what they are of: visible, publish, verify (slowest receiver), copy, digest."""
    samples: dict[str, list[float]] = {"visible": [], "publish": [], "verify": [], "copy": [], "digest": []}
    plain = bytearray(sum(publisher.layout.bucket_bytes))
    target = memoryview(bytearray(len(plain)))
    for _ in range(repeats + WARM_UP):
        started = time.perf_counter()
        published = publisher.publish(next(refs))
        assert published is not None
        line = msgspec.msgpack.encode((published.manifest, shm_offer(published.path))).hex()
        for receiver in receivers:
            receiver.tell(line)
        verify = max(float(receiver.hear().split()[1]) for receiver in receivers)
        samples["visible"].append(1000 * (time.perf_counter() - started))
        samples["publish"].append(1000 * published.seconds)
        samples["verify"].append(1000 * verify)
        settle()
        started = time.perf_counter()
        target[:] = plain
        samples["copy"].append(1000 * (time.perf_counter() - started))
        started = time.perf_counter()
        xxhash.xxh3_128_digest(plain)
        samples["digest"].append(1000 * (time.perf_counter() - started))
    return {name: values[WARM_UP:] for name, values in samples.items()}


# --- pull ---------------------------------------------------------------------------------------------------------


@contextmanager
def weight_socket(context: zmq.Context, server: ChunkServer | None, payload: memoryview) -> Iterator[str]:
    """A ROUTER thread: answers PULLs from `server`, or, without one, every request with the same `payload`."""
    socket, stop = context.socket(zmq.ROUTER), threading.Event()
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    decoder = Decoder(TO_WEIGHTS)

    def serve() -> None:
        while not stop.is_set():
            if not socket.poll(50):
                continue
            peer, frame = socket.recv_multipart()
            if server is None:
                socket.send_multipart([peer, b"", payload], copy=False)
                continue
            pull = decoder.decode(frame)
            assert isinstance(pull, Pull)
            chunk, part = server.answer(pull)
            socket.send_multipart([peer, encode(chunk), part], copy=False)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(timeout=10)
        socket.close(linger=0)


def bare_pull(context: zmq.Context, endpoint: str, count: int, window: int, target: memoryview) -> float:
    """Seconds for `count` messages, `window` in flight, each copied into `target`; nothing is checked."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    started = time.perf_counter()
    for _ in range(min(window, count)):
        socket.send(b"next")
    for index in range(count):
        payload = socket.recv_multipart(copy=False)[1].buffer
        target[index * len(payload) : (index + 1) * len(payload)] = payload
        if index + window < count:
            socket.send(b"next")
    seconds = time.perf_counter() - started
    socket.close(linger=0)
    return seconds


def pull_rounds(published: PublishedVersion, layout: Layout, repeats: int) -> tuple[list[float], list[float]]:
    """MB/s of verified pulls, and of bare messages."""
    context, limits, token = zmq.Context(), Limits(), bytes(16)
    server = ChunkServer(pull_token=token)
    server.add(published.manifest, published.path, layout.bucket_bytes)
    chunk = memoryview(bytes(limits.chunk_bytes))
    count = published.nbytes // limits.chunk_bytes
    target = memoryview(bytearray(count * limits.chunk_bytes))
    pulled, bare = [], []
    with weight_socket(context, server, chunk) as ours, weight_socket(context, None, chunk) as raw:
        for _ in range(repeats + 1):
            receiver = ZmqReceiver(ours, context, pull_token=token, limits=limits)
            started = time.perf_counter()
            receiver.receive(published.manifest, layout, cancelled=threading.Event(), deadline=time.monotonic() + 60)
            pulled.append(published.nbytes / (time.perf_counter() - started) / 1e6)
            bare.append(len(target) / bare_pull(context, raw, count, limits.pull_window, target) / 1e6)
    context.destroy(linger=0)
    return pulled[1:], bare[1:]


# --- the table ----------------------------------------------------------------------------------------------------


def check_bits(publisher: Publisher, parameters: Sequence[tuple[str, torch.Tensor]], ref: VersionRef) -> None:
    published = publisher.publish(ref)
    assert published is not None
    fetched = WeightSource(zmq.Context()).fetch(published.manifest, [shm_offer(published.path)], publisher.layout)
    tensors = fetched.document.tensors()
    if not all(torch.equal(tensors[name], parameter) for name, parameter in parameters):
        sys.exit("the received tensors differ from the parameters: no time is worth measuring")


def baseline(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "source": "this bench", "version": "1", "measured_here": True}


def main() -> int:
    parser = shared_arguments(__doc__ or "")
    parser.add_argument("--mib", type=int, default=64, help="size of the document")
    parser.add_argument("--receiver", action="store_true", help="be a receiving process")
    parser.set_defaults(repeats=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receiver:
        receive_for_ever()
        return 0
    repeats = 3 if options.quick else options.repeats
    lines = []
    parameters = make_parameters(options.mib, options.seed)
    refs = (VersionRef(1, version) for version in range(1 << 30))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shm = stack.enter_context(ShmPublisher(document_directory("bench-weights", folder), "bench-weights"))
        publisher = Publisher(parameters, wire_dtype=torch.float32, bucket_bytes=16 << 20, shm=shm)
        check_bits(publisher, parameters, next(refs))
        for num_receivers in (1, 4):
            lines.append(shm_line(publisher, shm, refs, num_receivers, repeats, options))
        lines.append(zmq_line(publisher, refs, repeats, options))
    return exit_status(lines, options.check)


def shm_line(
    publisher: Publisher, shm: ShmPublisher, refs: Iterator[VersionRef], num_receivers: int, repeats: int, options: Any
) -> dict[str, Any]:
    with ExitStack() as stack:
        receivers = [ReceiverProcess(publisher.layout) for _ in range(num_receivers)]
        for receiver in receivers:
            stack.callback(receiver.close)
        samples = visible_rounds(publisher, receivers, refs, repeats, shm.settle)
    median = {name: statistics.median(values) for name, values in samples.items()}
    table = "  ".join(f"{name}={value:.1f}ms" for name, value in median.items())
    print(f"publish.visible_ms.shm  actors={num_receivers}  MiB={options.mib}  {table}", file=sys.stderr)
    params = {"mib": options.mib, "actors": num_receivers, "dtype": "float32", "bucket_mib": 16}
    params |= {f"{name}_ms": round(median[name], 3) for name in ("publish", "verify", "copy", "digest")}
    goal = {"id": "P8", "op": "<=", "value": GOALS_MS[num_receivers]} if options.mib == 64 else None
    return record(
        f"weights.visible_ms.shm.{num_receivers}", median["visible"], "ms", "lower", samples["visible"], params,
        baseline("one copy and one digest in memory", median["copy"] + median["digest"], "ms"), goal, seed=options.seed,
    )  # fmt: skip


def zmq_line(publisher: Publisher, refs: Iterator[VersionRef], repeats: int, options: Any) -> dict[str, Any]:
    published = publisher.publish(next(refs))
    assert published is not None
    pulled, bare = pull_rounds(published, publisher.layout, repeats)
    value, bound = statistics.median(pulled), statistics.median(bare)
    print(f"weights.pull_mb_s.zmq  MiB={options.mib}  median={value:.0f}  bare={bound:.0f} MB/s", file=sys.stderr)
    params = {"mib": options.mib, "chunk_bytes": 1 << 20, "window": 8, "security": "plain", "same_process": True}
    return record(
        "weights.pull_mb_s.zmq", value, "MB/s", "higher", pulled, params,
        baseline("bare DEALER/ROUTER, same messages, unchecked", bound, "MB/s"), seed=options.seed,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
