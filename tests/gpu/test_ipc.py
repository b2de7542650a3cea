"""Weights between two processes on one GPU: CUDA IPC, the everyday way of a one-GPU machine."""

import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest
import torch
import zmq

from streamrl.errors import WeightsError
from streamrl.messages import Manifest, Offer, VersionRef
from streamrl.weights.gpu.cuda_memory import CudaMemory
from streamrl.weights.gpu.device_document import DeviceDocument, DocumentFold, _kernel_on, fold128
from streamrl.weights.gpu.ipc import IpcBufferServer
from streamrl.weights.manifest import DIGEST_FOLD128, bucket_ranges, document_nbytes, make_layout, make_manifest
from tests.gpu.device import needs_gpu, start
from tests.unit.weights.fold_reference import fold128_numpy

pytestmark = [*needs_gpu, pytest.mark.timeout(300)]

LAYOUT = make_layout(
    [("embed", "bfloat16", (5003, 1024)), ("scale", "float32", (7,)), ("head", "bfloat16", (2048, 3001))],
    bucket_bytes=1 << 20,
)

READER = """
import sys, threading, time
import msgspec, torch, zmq
from streamrl.messages import Layout, Manifest, Offer
from streamrl.weights.gpu.cuda_memory import CudaMemory
from streamrl.weights.transport import receive
from streamrl.weights.gpu.ipc import IpcBufferReader, IpcBufferReceiver

layout = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Layout)
memory = CudaMemory("cuda")
reader = IpcBufferReader(memory, zmq.Context())
print("ready", memory.device_id, flush=True)
for line in sys.stdin:
    manifest, offer = msgspec.msgpack.decode(bytes.fromhex(line), type=tuple[Manifest, Offer])
    try:
        document = receive(
            IpcBufferReceiver(offer, reader), manifest, layout, cancelled=threading.Event(),
            deadline=time.monotonic() + 60,
        ).document
    except Exception as error:
        print("error", repr(error), flush=True)
        continue
    sums = [int(tensor.view(torch.uint8).to(torch.int64).sum()) for tensor in document.tensors().values()]
    print("sums", *sums, flush=True)
"""


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, (1 << 20) + 3, (70 << 20) + 5])
def test_the_device_folds_to_the_hosts_number(nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)

    assert fold128(torch.from_numpy(data).cuda()) == fold128_numpy(data)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which CUDA builds of torch bring")
def test_the_digests_kernel_runs_on_this_gpu_and_agrees_on_pieces():
    body = torch.randint(0, 256, (document_nbytes(LAYOUT),), dtype=torch.uint8).cuda()
    assert _kernel_on(body.device) is not None
    fold, start = DocumentFold(LAYOUT, body.device), 0
    for nbytes in (3, 5_000_002, body.numel() - 5_000_005):
        fold.append(body[start : start + nbytes])
        start += nbytes
    data = body.cpu().numpy()
    assert fold.digests() == [fold128_numpy(data[begin:end]) for begin, end in bucket_ranges(LAYOUT)]


class GpuBuckets:
    """A document on the device, as a source."""

    def __init__(self, body: torch.Tensor) -> None:
        self.layout, self.body = LAYOUT, body

    def fill(self, index: int, out: torch.Tensor) -> None:
        begin, end = bucket_ranges(LAYOUT)[index]
        out[: end - begin].copy_(self.body[begin:end])
        torch.cuda.current_stream().synchronize()


class Scene:
    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="slots-")
        self._context = zmq.Context()
        self.memory = CudaMemory("cuda")
        self.server = IpcBufferServer(
            self.memory, self._context, f"ipc://{self._home.name}/slots", slot_bytes=1 << 20, deadline_s=10.0
        )
        self.readers: list[subprocess.Popen[str]] = []

    def publish(self, version: int) -> tuple[Manifest, torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(version)
        nbytes = document_nbytes(LAYOUT)
        body = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)
        fold = DocumentFold(LAYOUT, "cuda")
        fold.append(body)
        manifest = make_manifest(LAYOUT, VersionRef(1, version), None, fold.digests(), DIGEST_FOLD128)
        self.server.publish(manifest.ref, GpuBuckets(body))
        return manifest, body

    def reader(self) -> subprocess.Popen[str]:
        process = start(READER, msgspec.msgpack.encode(LAYOUT).hex())
        self.readers.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["ready", self.memory.device_id]
        return process

    def ask(self, process: subprocess.Popen[str], manifest: Manifest) -> None:
        offer = Offer(
            "ipc", self.server.endpoint, document_nbytes(LAYOUT), manifest=manifest, slots=self.server.ticket
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode((manifest, offer)).hex() + "\n")
        process.stdin.flush()

    def close(self) -> None:
        for process in self.readers:
            process.kill()
            process.wait()
        self.server.close()
        self._context.destroy(linger=0)
        self._home.cleanup()


@pytest.fixture
def scene() -> Iterator[Scene]:
    one = Scene()
    yield one
    one.close()


def sums_of(manifest: Manifest, body: torch.Tensor) -> str:
    tensors = DeviceDocument(body, manifest, manifest, LAYOUT).tensors()
    return " ".join(["sums", *(str(int(t.view(torch.uint8).to(torch.int64).sum())) for t in tensors.values())])


def test_versions_reach_two_other_processes_through_the_slots(scene):
    readers = [scene.reader(), scene.reader()]
    for version in range(3):
        manifest, body = scene.publish(version)
        for process in readers:
            scene.ask(process, manifest)
        for process in readers:
            assert process.stdout.readline().strip() == sums_of(manifest, body)


def test_a_killed_reader_delays_no_other(scene):
    victim, other = scene.reader(), scene.reader()
    manifest, body = scene.publish(1)
    scene.ask(victim, manifest)
    victim.kill()
    scene.ask(other, manifest)

    assert other.stdout.readline().strip() == sums_of(manifest, body)


def test_a_wrong_digest_is_refused_on_the_device(scene):
    process = scene.reader()
    manifest, body = scene.publish(1)
    body[3] ^= 1  # after its digests were taken
    scene.ask(process, manifest)

    assert "bucket 0 of" in process.stdout.readline()


def test_an_invalid_handle_is_an_error_and_no_crash():
    with pytest.raises(WeightsError, match="cuIpcOpenMemHandle"):
        CudaMemory("cuda").open(bytes(64), 1 << 20)


def test_slots_are_given_back_to_the_device():
    memory = CudaMemory("cuda")
    slot, _ = memory.create(1 << 30)
    slot.fill_(1)
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    del slot

    assert torch.cuda.mem_get_info()[0] - before >= 1 << 30
