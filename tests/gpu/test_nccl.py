"""NCCL through cupy on one GPU: a group of one, bounded calls, and two ranks where the library allows them."""

from importlib.util import find_spec

import pytest
import torch

from streamrl.messages import VersionRef
from streamrl.weights.gpu.broadcast import Broadcaster
from streamrl.weights.gpu.nccl import UNIQUE_ID_BYTES, CupyNccl, GuardedCommunicator, Threads
from streamrl.weights.manifest import document_nbytes, make_layout
from tests.gpu.device import finish, needs_gpu, start

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(find_spec("cupy") is None, reason="needs cupy: pip install 'streamrl[nccl]'"),
    pytest.mark.timeout(300),
]

MULTI_RANK_FROM = 23003
"""Two ranks on one GPU are refused by older libraries: 2.30.3, as get_version counts."""


@pytest.fixture(scope="module")
def library() -> CupyNccl:
    return CupyNccl("cuda")


class Ones:
    def __init__(self) -> None:
        self.layout = make_layout([("w", "bfloat16", (1000, 777))], bucket_bytes=1 << 19)
        self.filled: list[int] = []

    def fill(self, index: int, out: torch.Tensor) -> None:
        self.filled.append(index)
        out.fill_(1)


def test_the_library_is_there_and_names_groups(library):
    one, other = library.unique_id(), library.unique_id()

    assert library.version > 20000
    assert len(one) == UNIQUE_ID_BYTES and one != other


def test_a_group_of_one_is_formed_tested_used_and_left(library):
    guard = GuardedCommunicator(
        library, threads := Threads(), rank=0, world=1, unique_id=library.unique_id(), what="epoch 1"
    )
    guard.form(60.0)
    data = torch.arange(1 << 20, device="cuda").to(torch.uint8)
    before = data.clone()
    guard.broadcast(data, 30.0)
    guard.close()

    assert torch.equal(data, before) and threads.num_abandoned == 0


def test_epoch_after_epoch_is_formed_and_carries_a_version(library):
    sender = Broadcaster(library, "cuda")
    for epoch in (1, 2):
        sender.form(epoch, 1, sender.name(), 60.0)
        source = Ones()
        sender.send(VersionRef(1, epoch), source, deadline_s=30.0)
        assert source.filled == list(range(len(source.layout.bucket_bytes)))
    sender.close()
    assert document_nbytes(source.layout) == 1_554_000 and sender.threads.num_abandoned == 0


ALONE = """
import os, time
from streamrl.errors import WeightsError
from streamrl.weights.gpu.nccl import GuardedCommunicator, Threads
from streamrl.weights.gpu.nccl import CupyNccl

library, threads = CupyNccl("cuda"), Threads()
guard = GuardedCommunicator(library, threads, rank=0, world=2, unique_id=library.unique_id(), what="epoch 1")
began = time.monotonic()
try:
    guard.form(3.0)
except WeightsError as error:
    print("refused", threads.num_abandoned, time.monotonic() - began < 20, flush=True)
os._exit(0)
"""


def test_a_member_that_never_comes_costs_a_deadline_and_a_thread():
    assert finish(start(ALONE)).split() == ["refused", "1", "True"]


RANK = """
import os, sys
import torch
from streamrl.weights.gpu.nccl import GuardedCommunicator, Threads
from streamrl.weights.gpu.nccl import CupyNccl

rank = int(sys.argv[1])
library = CupyNccl("cuda")
if rank == 0:
    unique_id = library.unique_id()
    print(unique_id.hex(), flush=True)
else:
    unique_id = bytes.fromhex(sys.argv[2])
guard = GuardedCommunicator(library, Threads(), rank=rank, world=2, unique_id=unique_id, what="epoch 1")
guard.form(90.0)
data = torch.full((1 << 20,), 7 - 7 * rank, dtype=torch.uint8, device="cuda")
guard.broadcast(data, 60.0)
print(int(data.sum()), flush=True)
os._exit(0)
"""


def test_two_ranks_on_one_gpu_where_the_library_allows_it(library):
    if library.version < MULTI_RANK_FROM:
        pytest.skip(f"NCCL {library.version} refuses two ranks on one GPU; {MULTI_RANK_FROM} and later can be told to")
    allow = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
    root = start(RANK, "0", **allow)
    other = start(RANK, "1", root.stdout.readline().strip(), **allow)

    assert int(finish(other, 180)) == int(finish(root, 180)) == 7 << 20
