"""NCCL with one GPU: a group of two processes where the library allows it, and the member that never comes.

    form         two ranks connect and count each other
    broadcast    rank 0's bytes arrive in the other process
    abort        the other rank does not come to a broadcast: the deadline ends it
    killed       the other process is killed, and the next broadcast ends at its deadline
    re_form      a new process joins a new group, and a broadcast arrives
    never_comes  a group whose second member never comes: forming it ends at the deadline, and a group of one works

Two ranks on one GPU need NCCL 2.30.3 or later and NCCL_MULTI_RANK_GPU_ENABLE=1, which this command sets; with older
ones only the last line is made.

Run: python -m bench.gpu_nccl [--dry-run]; a dry run takes a communicator over sockets, on the CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

if "--dry-run" in sys.argv:  # before the shapes are imported, here and in the processes that this one starts
    os.environ.setdefault("STREAMRL_BENCH_DRY_RUN", tempfile.mkdtemp(prefix="gpu-dry-run-"))

from bench import record as recording
from bench.gpu_paths import MULTI_RANK_FROM
from bench.gpu_shapes import DEVICE, DRY
from bench.record import record
from streamrl.errors import ConfigError
from streamrl.weights.gpu.nccl import CommunicatorError, CupyNccl, GuardedCommunicator, Threads
from tests.fakes.communicator import FakeLibrary

ROOT = Path(__file__).parent.parent
ALLOW = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
FORM_S = 60.0
DEADLINE_S = 0.5 if DRY else 5.0
"""Deadline of a step that is meant to fail."""


class Member:
    """Rank 1, in a process of its own that does what it is told."""

    def __init__(self, unique_id: bytes) -> None:
        command = [sys.executable, "-m", "bench.gpu_nccl", "--member", unique_id.hex()]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **ALLOW}
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it has loaded its libraries, and connects

    def receive(self, nbytes: int) -> None:
        """Have it take part in a broadcast of so many bytes."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{nbytes}\n")
        self.process.stdin.flush()

    def received(self) -> int:
        """The sum of the bytes that came."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def be_member(unique_id: bytes) -> None:
    guard = _guard(_library(), 1, 2, unique_id)
    print("connects", flush=True)
    guard.form(FORM_S)
    for line in sys.stdin:
        data = torch.zeros(int(line), dtype=torch.uint8, device=DEVICE)
        guard.broadcast(data, FORM_S)
        print(int(data.sum(dtype=torch.int64)), flush=True)


def _library() -> CupyNccl | FakeLibrary:
    return FakeLibrary() if DRY else CupyNccl(DEVICE)


def _guard(library: CupyNccl | FakeLibrary, rank: int, world: int, unique_id: bytes) -> GuardedCommunicator:
    return GuardedCommunicator(library, Threads(), rank=rank, world=world, unique_id=unique_id, what="one GPU")


def _formed(library: CupyNccl | FakeLibrary) -> tuple[GuardedCommunicator, Member, float]:
    unique_id = library.unique_id()
    member, began = Member(unique_id), time.perf_counter()
    guard = _guard(library, 0, 2, unique_id)
    try:
        guard.form(FORM_S)
    except CommunicatorError:
        member.kill()
        raise
    return guard, member, 1000 * (time.perf_counter() - began)


def _sent(guard: GuardedCommunicator, member: Member, data: torch.Tensor) -> float:
    """Milliseconds of a broadcast that arrived in whole."""
    member.receive(data.numel())
    began = time.perf_counter()
    guard.broadcast(data, FORM_S)
    found = 1000 * (time.perf_counter() - began)
    expected = int(data.sum(dtype=torch.int64))
    if (came := member.received()) != expected:
        raise SystemExit(f"wrong: the bytes that arrived sum to {came}, those that were sent to {expected}")
    return found


def _refused(work: Callable[[], None]) -> float:
    """Milliseconds until a call that cannot succeed is given up."""
    began = time.perf_counter()
    try:
        work()
    except CommunicatorError:
        return 1000 * (time.perf_counter() - began)
    raise SystemExit("wrong: a call succeeded without the other rank")


def two_ranks(nbytes: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds by step. Raises CommunicatorError where NCCL refuses two ranks on one GPU."""
    library, found = _library(), {}
    data = torch.full((nbytes,), 7, dtype=torch.uint8, device=DEVICE)
    guard, member, form_ms = _formed(library)
    found["form"] = [form_ms]
    found["broadcast"] = [_sent(guard, member, data) for _ in range(repeats)]
    found["abort"] = [_refused(lambda: guard.broadcast(data, DEADLINE_S))]
    member.kill()

    guard, member, _ = _formed(library)
    _sent(guard, member, data)
    member.kill()
    found["killed"] = [_refused(lambda: guard.broadcast(data, DEADLINE_S))]

    guard, member, form_ms = _formed(library)
    _sent(guard, member, data)
    found["re_form"] = [form_ms]
    guard.close()
    member.kill()
    return found


def never_comes() -> dict[str, list[float]]:
    """The deadline of a group that lacks a member; afterwards a group of one is formed."""
    library = _library()
    found = _refused(lambda: _guard(library, 0, 2, library.unique_id()).form(DEADLINE_S))
    alone = _guard(library, 0, 1, library.unique_id())
    alone.form(FORM_S)
    alone.close()
    return {"never_comes": [found]}


def measure(nbytes: int, repeats: int) -> list[dict]:
    """A recorded line for each step; none without cupy."""
    os.environ.update(ALLOW)
    try:
        version = MULTI_RANK_FROM if DRY else CupyNccl(DEVICE).version
    except ConfigError as error:
        print(f"gpu.ranks is skipped: {error}", file=sys.stderr)
        return []
    found: dict[str, list[float]] = {}
    if version >= MULTI_RANK_FROM:
        try:
            found = two_ranks(nbytes, repeats)
        except CommunicatorError as error:
            print(f"gpu.ranks: NCCL {version} forms no group of two on one GPU: {error}", file=sys.stderr)
    else:
        print(f"gpu.ranks: NCCL {version} refuses two ranks on one GPU, 2.30.3 can be told to", file=sys.stderr)
    found |= never_comes()
    params = {"nccl": version, "bytes": nbytes, "deadline_s": DEADLINE_S}
    return [
        record(f"gpu.ranks.{name}", statistics.median(samples), "ms", "lower", samples, params)
        for name, samples in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="over sockets, on the CPU; nothing is recorded")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        be_member(bytes.fromhex(args.member))
        return 0
    if DRY:
        recording.RESULTS = Path(DRY)
    measure(1 << 16 if DRY else 1 << 28, args.repeats)
    sys.stdout.flush()
    os._exit(0)  # a thread may wait inside NCCL for good


if __name__ == "__main__":
    sys.exit(main())
