"""How long from "publish" until an actor holds verified weights, over every transport of a host?

publish -> verified visible: the learner's `Publisher` gathers, digests and commits a document; every receiver process
maps it, verifies all buckets and reports over a pipe. The clock runs in the publishing process, from the call of
`publish` to the last receiver's report. Beside it, in the same run and with the same bytes: one copy of the document in
memory and one digest of it, which every transport needs. Between two rounds the publisher may finish what it does
behind a commit (unlink the retired document, make room for the next), as it does while a learner trains.

threads: the learner's part alone, a document written by one thread and by as many as it chooses, in turns.

pull, delta, pause: see `weights_pull`, `weights_delta` and `weights_pause`, each a part of this benchmark.

Before any clock starts, the received tensors are compared with the parameters bit for bit.

Run: python -m bench.weights [--mib 64] [--repeats 15] [--parts shm zmq delta pause threads] [--quick] [--check]
     python -m bench.weights --interrupt 10000      see `interrupts`; nothing else is measured then
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
import zmq

from bench.record import exit_status, record, shared_arguments
from bench.weights_delta import delta_lines
from bench.weights_pause import pause_line
from bench.weights_pull import CHUNK_BYTES, pull_rounds, serve_forever
from learner.publish.buckets import BucketWriter, num_threads
from learner.publish.publisher import Publisher
from streamrl.messages import Layout, Limits, Manifest, Offer, VersionRef
from streamrl.weights.document import HEADER_BYTES
from streamrl.weights.manifest import document_nbytes, make_layout
from streamrl.weights.shm.directory import document_directory
from streamrl.weights.shm.transport import ShmPublisher, SpareFile, shm_offer
from streamrl.weights.transport import WeightSource

PARTS = ("shm", "zmq", "delta", "pause", "threads")
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


def receive_forever() -> None:
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
        self.send(msgspec.msgpack.encode(layout).hex())
        assert self.hear() == "ready"

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


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
            receiver.send(line)
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these")
    parser.add_argument("--interrupt", type=int, default=0, help="interrupt so many publishes instead")
    parser.add_argument("--receiver", action="store_true", help="be a receiving process")
    parser.add_argument("--server", action="store_true", help="be a serving process")
    parser.set_defaults(repeats=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receiver:
        receive_forever()
        return 0
    if options.server:
        serve_forever()
        return 0
    if options.interrupt:
        return exit_status([interrupt_line(options.interrupt, options.seed)], options.check)
    repeats = 3 if options.quick else options.repeats
    lines = publish_lines(repeats, options) if {"shm", "zmq"} & set(options.parts) else []
    if "delta" in options.parts:
        lines += delta_lines(options.mib, repeats, options.seed)
    if "pause" in options.parts:
        lines.append(pause_line(repeats, options.seed))
    if "threads" in options.parts:
        lines.append(threads_line(repeats, options))
    return exit_status(lines, options.check)


def threads_line(repeats: int, options: Any) -> dict[str, Any]:
    """Milliseconds in which a document of bfloat16 is filled and digested, by one thread and by several."""
    parameters = [(name, one.detach().bfloat16()) for name, one in make_parameters(2 * options.mib, options.seed)]
    layout = make_layout(((name, "bfloat16", one.shape) for name, one in parameters), 16 << 20)
    tensors, dtypes = [one for _, one in parameters], [torch.bfloat16] * len(parameters)
    several = num_threads(document_nbytes(layout))
    writers = {count: BucketWriter(layout, dtypes, torch.device("cpu"), threads=count) for count in (1, several)}
    samples: dict[int, list[float]] = {count: [] for count in writers}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = SpareFile(Path(folder) / "document", document_nbytes(layout))
        file.populate()
        body, digests = memoryview(file.mapping)[HEADER_BYTES:], []
        for _ in range(repeats + 1):  # the first one finds its memory
            for count, writer in writers.items():
                started = time.perf_counter()
                digests.append(writer.write(tensors, body))
                samples[count].append(1000 * (time.perf_counter() - started))
    if digests != digests[:1] * len(digests):
        sys.exit("the threads write another document: no time is worth measuring")
    one, many = samples[1][1:], samples[several][1:]
    ratio = statistics.median(a / b for a, b in zip(one, many, strict=True))
    print(f"weights.write_ms  MiB={options.mib}  threads={several}  {ratio:.2f} times as fast as 1", file=sys.stderr)
    params = {"mib": options.mib, "threads": several, "dtype": "bfloat16", "bucket_mib": 16}
    params |= {"one_thread_ms": [round(part, 1) for part in one], "ratio": round(ratio, 3)}
    return record(
        "weights.write_ms", statistics.median(many), "ms", "lower", many, params,
        baseline("the same by one thread", statistics.median(one), "ms"), seed=options.seed,
    )  # fmt: skip


def publish_lines(repeats: int, options: Any) -> list[dict[str, Any]]:
    lines = []
    parameters = make_parameters(options.mib, options.seed)
    refs = (VersionRef(1, version) for version in range(1 << 30))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shm = stack.enter_context(ShmPublisher(document_directory("bench-weights", folder), "bench-weights"))
        publisher = Publisher(parameters, wire_dtype=torch.float32, bucket_bytes=16 << 20, shm=shm)
        check_bits(publisher, parameters, next(refs))
        for num_receivers in (1, 4) if "shm" in options.parts else ():
            lines.append(shm_line(publisher, shm, refs, num_receivers, repeats, options))
        if "zmq" in options.parts:
            lines.append(zmq_line(publisher, refs, repeats, options))
    return lines


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
    pulled, bare = pull_rounds(published.path, published.manifest, publisher.layout, repeats)
    value, bound = statistics.median(pulled), statistics.median(bare)
    share = statistics.median(one / other for one, other in zip(pulled, bare, strict=True))
    print(f"weights.pull.zmq  MiB={options.mib}  {value:.0f} of {bound:.0f} MB/s bare, {share:.0%}", file=sys.stderr)
    params = {
        "mib": options.mib, "chunk_bytes": CHUNK_BYTES, "window": Limits().pull_window, "security": "plain",
        "mb_s": round(value, 1), "value": "median of verified over bare, round by round",
    }
    return record(
        "weights.pull_share.zmq", share, "", "higher", pulled, params,
        baseline("bare DEALER/ROUTER, the same bytes, unchecked", bound, "MB/s"),
        {"id": "issue 4", "op": ">=", "value": 0.6}, seed=options.seed,
    )  # fmt: skip


def interrupt_line(count: int, seed: int) -> dict[str, Any]:
    """Measures in a process of its own: what is forked there must not carry torch along."""
    command = [sys.executable, "-m", "bench.interrupts", "--count", str(count), "--seed", str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    print(f"weights.interrupts  {count} rounds, {len(found['broken'])} broken  {found['outcomes']}", file=sys.stderr)
    params = {"rounds": count, "outcomes": found["outcomes"], "seconds": round(found["seconds"], 1)}
    params |= {"broken": found["broken"][:20], "value": "torn or mixed versions that were served"}
    goal = {"id": "issue 4", "op": "<=", "value": 0}
    broken = float(len(found["broken"]))
    return record("weights.interrupts", broken, "", "lower", [broken], params, goal=goal, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
