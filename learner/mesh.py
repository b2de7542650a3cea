"""The gang of learner processes: who am I, how many are we, and the few numbers that we share.

One process needs no process group, and every method is then a no-op, so the loop has no second version. Only tensors of
numbers travel: object collectives pickle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from streamrl.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process's place among the learner ranks.

    Attributes:
        rank: 0 .. world - 1; rank 0 talks to the hub and writes what is written once.
        world: number of learner processes.
        device: where this rank computes.
        mesh: one-dimensional device mesh over all ranks for FSDP2; None in a lone process that does not shard.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None

    @classmethod
    def start(cls, device: str = "auto", *, timeout_s: float = 600.0, sharded: bool | None = None) -> Ranks:
        """Join the gang that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (torchrun sets them); else alone.

        Args:
            device: auto, cpu or cuda; cuda takes device number LOCAL_RANK.
            timeout_s: a collective that waits longer for another rank raises.
            sharded: make a process group even for one process, as FSDP2's mixed precision needs; None: on a GPU only.
        Raises:
            ConfigError: a device that is not here.
        """
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        where = _device(device)
        sharded = where.type == "cuda" if sharded is None else sharded
        if world == 1 and not sharded:
            return cls(rank, world, where, None)
        backend = "nccl" if where.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if world == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
        return cls(rank, world, where, init_device_mesh(where.type, (world,), mesh_dim_names=("shard",)))

    def close(self) -> None:
        """Leave the gang. Safe to call alone and twice."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce([0.0])

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks in float64, entry by entry; the same list on every rank."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maximum(self, value: float) -> float:
        """The largest `value` of any rank."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's list, by rank; lists may differ in length (float64, so integers are exact up to 2**53)."""
        if self.world == 1:
            return [list(values)]
        lengths = [int(x) for x in self.all_reduce([float(len(values)) * (r == self.rank) for r in range(self.world)])]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.float64, device=self.device)
        padded[: len(values)] = torch.tensor(list(values), dtype=torch.float64)
        everyone = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(everyone, padded)
        return [row.tolist()[:length] for row, length in zip(everyone, lengths, strict=True)]

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigError(f"run.device={name!r} is unknown: choose auto, cpu or cuda.")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"run.device=cuda: local rank {index} needs GPU {index}, but {count} are visible here.")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
