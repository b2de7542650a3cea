"""The paths that `bench.gpu` measures, set up as the system sets them up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import zmq

from actors.engines.base import GenerateRequest
from actors.engines.native.engine import NativeEngine
from actors.engines.native.weights import checkpoint_tensors
from bench.gpu_shapes import DEVICE, DRY, free_device_memory, pinned, random_model
from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest, Offer, Sampling, VersionRef
from streamrl.weights.document import Document
from streamrl.weights.gpu.broadcast import Broadcaster
from streamrl.weights.gpu.cuda_memory import CudaMemory, wait_for_device
from streamrl.weights.gpu.device_document import DocumentFold, HostBuckets
from streamrl.weights.gpu.ipc import IpcBufferReader, IpcBufferReceiver, IpcBufferServer
from streamrl.weights.gpu.nccl import CupyNccl, GuardedCommunicator, Threads
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_digest, bucket_ranges, make_layout, make_manifest
from streamrl.weights.transport import receive
from tests.fakes.communicator import FakeLibrary
from tests.fakes.device_memory import FakeDeviceMemory

MULTI_RANK_FROM = 23003
def slot_memory() -> CudaMemory | FakeDeviceMemory:
    return FakeDeviceMemory(Path(DRY)) if DRY else CudaMemory(DEVICE)


# --- slots --------------------------------------------------------------------------------------------------------


class DeviceBuckets:
    """A document that lies on the sender's device."""

    def __init__(self, layout: Layout, body: torch.Tensor) -> None:
        self.layout, self._body, self._ranges = layout, body, bucket_ranges(layout)

    def fill(self, index: int, out: torch.Tensor) -> None:
        start, end = self._ranges[index]
        out[: end - start].copy_(self._body[start:end])
        wait_for_device(torch.device(DEVICE))


class SlotScene:
    """A sender with one document of this size in its memory (`device`) or on the host (`host`)."""

    def __init__(self, nbytes: int, kind: str, bucket_bytes: int) -> None:
        self._home, self._context = tempfile.TemporaryDirectory(prefix="slots-"), zmq.Context()
        self.layout = make_layout([("w", "uint8", (nbytes,))], bucket_bytes)
        self._server = IpcBufferServer(
            slot_memory(), self._context, f"ipc://{self._home.name}/slots", slot_bytes=bucket_bytes,
            deadline_s=60.0,
        )
        body = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)
        fold = DocumentFold(self.layout, DEVICE)
        fold.append(body)
        self._digests = fold.digests()
        self._source: DeviceBuckets | HostBuckets = DeviceBuckets(self.layout, body)
        if kind == "host":
            host = body.cpu().numpy()
            digests = [bucket_digest(memoryview(host[a:b])) for a, b in bucket_ranges(self.layout)]
            document = Document(host, make_manifest(self.layout, VersionRef(1, 0), None, digests), self.layout)
            self._source = HostBuckets(document.verify(), None if DRY else pinned(bucket_bytes))
        self._version, self.first_ms = 0, 0.0

    def update(self, reader: ReaderProcess) -> tuple[float, float, float]:
        """(transfer_s, verify_s, seconds from asking to the reader's word) of one more version."""
        self._version += 1
        ref = VersionRef(1, self._version)
        manifest = make_manifest(self.layout, ref, None, self._digests, DIGEST_FOLD128)
        self._server.publish(ref, self._source)
        offer = Offer("ipc", self._server.endpoint, 0, manifest=manifest, slots=self._server.ticket)
        started = time.perf_counter()
        transfer_s, verify_s = reader.receive(self.layout, manifest, offer)
        seconds = time.perf_counter() - started
        self.first_ms = self.first_ms or 1000 * seconds
        return transfer_s, verify_s, seconds

    def __enter__(self) -> SlotScene:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._context.destroy(linger=0)
        self._home.cleanup()
        self._source = None  # type: ignore[assignment]
        free_device_memory()


class ReaderProcess:
    """An actor's end in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_paths", "reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )

    def receive(self, layout: Layout, manifest: Manifest, offer: Offer) -> tuple[float, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.msgpack.encode((layout, manifest, offer)).hex() + "\n")
        self._process.stdin.flush()
        words = self._process.stdout.readline().split()
        if len(words) != 2:
            raise WeightsError(f"the reading process failed: {words}")
        return float(words[0]), float(words[1])

    def __enter__(self) -> ReaderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def read_forever() -> None:
    reader = IpcBufferReader(slot_memory(), zmq.Context())
    for line in sys.stdin:
        layout, manifest, offer = msgspec.msgpack.decode(bytes.fromhex(line), type=tuple[Layout, Manifest, Offer])
        fetched = receive(
            IpcBufferReceiver(offer, reader), manifest, layout, cancelled=threading.Event(),
            deadline=time.monotonic() + 120,
        )
        print(fetched.transfer_s, fetched.verify_s, flush=True)
        del fetched


# --- installs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installs:
    num_parameters: int
    nbytes: int
    step_ms: float
    pause_ms: list[float]
    install_ms: list[float]


def measure_installs(shape: str, running: int, repeats: int, seed: int, *, on_host: bool) -> Installs:
    """Weights that lie on the device, or on the host as `shm` has them, go into an engine whose sequences run on."""
    torch.manual_seed(seed)
    model, longest, new = random_model(shape), 256 if DRY else 4096, 150 if DRY else 4000
    place = "cpu" if on_host else DEVICE
    weights = {name: tensor.detach().to(place, copy=True) for name, tensor in checkpoint_tensors(model).items()}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())

    async def work() -> tuple[float, list[float], list[float]]:
        engine = NativeEngine(model, None, max_num_seqs=max(1, running), max_tokens=longest, device=DEVICE)
        await engine.install(weights, VersionRef(1, 0))
        requests = [
            GenerateRequest([5 + n % 7] * 64, Sampling(), new, seed=n, ignore_eos=True) for n in range(running)
        ]
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        while running and engine.stats().steps_total < (2 if DRY else 20):
            await asyncio.sleep(0.01)
        before, began = engine.stats().steps_total, time.perf_counter()
        await asyncio.sleep(1.0 if running and not DRY else 0.0)
        steps = engine.stats().steps_total - before
        step_ms = 1000 * (time.perf_counter() - began) / steps if steps else 0.0
        pauses, installs = [], []
        for version in range(1, repeats + 3):
            times = await engine.install(weights, VersionRef(1, version))
            if version > 2:
                pauses.append(1000 * times.pause_s)
                installs.append(1000 * times.install_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()
        return step_ms, pauses, installs

    return Installs(sum(t.numel() for t in weights.values()), nbytes, *asyncio.run(work()))


# --- NCCL ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NcclNumbers:
    version: int
    form_ms: list[float]
    call_ms: list[float]
    two_rank_ms: list[float] | None
    why_not: str


def measure_nccl(repeats: int, nbytes: int) -> NcclNumbers:
    """Raises ConfigError if cupy or NCCL is missing."""
    library = FakeLibrary() if DRY else CupyNccl(DEVICE)
    sender, form_ms, call_ms = Broadcaster(library, DEVICE), [], []
    data = torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    for epoch in range(1, repeats + 2):
        started = time.perf_counter()
        sender.form(epoch, 1, sender.name(), 60.0)
        form_ms.append(1000 * (time.perf_counter() - started))
    guard = sender._guard
    assert guard is not None
    for _ in range(repeats + 2):
        started = time.perf_counter()
        guard.broadcast(data, 60.0)
        call_ms.append(1000 * (time.perf_counter() - started))
    sender.close()
    version = MULTI_RANK_FROM if DRY else library.version
    if version < MULTI_RANK_FROM:
        why = f"NCCL {version} refuses two ranks on one GPU; 2.30.3 and later can be told to"
        return NcclNumbers(version, form_ms[1:], call_ms[2:], None, why)
    return NcclNumbers(version, form_ms[1:], call_ms[2:], _two_ranks(library, repeats, nbytes), "")


def _two_ranks(library: CupyNccl | FakeLibrary, repeats: int, nbytes: int) -> list[float]:
    """Needs NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment (bench/gpu.sh sets it): two threads of this process."""
    unique_id, samples = library.unique_id(), []

    def rank(number: int) -> None:
        guard = GuardedCommunicator(
            library, Threads(), rank=number, world=2, unique_id=unique_id, what="two ranks on one GPU"
        )
        guard.form(60.0)
        data = torch.full((nbytes,), 7 - 7 * number, dtype=torch.uint8, device=DEVICE)
        for _ in range(repeats + 2):
            started = time.perf_counter()
            guard.broadcast(data, 60.0)
            if number == 0:
                samples.append(1000 * (time.perf_counter() - started))
        assert int(data[-1]) == 7
        guard.close()

    other = threading.Thread(target=rank, args=(1,), daemon=True)
    other.start()
    rank(0)
    other.join(60.0)
    return samples[2:]


if __name__ == "__main__":
    read_forever()
