"""The device mesh: which learner processes hold which part of the model, which share data, and who writes what.

    axis       ranks along it hold
    replicate  copies of the sharded model                data-parallel: every pair (replicate, shard)
    shard      parts of every parameter, by FSDP2         trains on groups of its own
    context    parts of every row, and of parameters too  same data: ranks that differ only here
    tensor     parts of every matrix                      get the same groups

World size counts processes; data-parallel size counts shares of a batch: world / (context * tensor). The tensor axis
varies fastest, so ranks that get the same groups are neighbors.

One process needs no process group, and every collective is then a no-op, so the loop has no second version. Only
tensors of numbers travel: object collectives pickle.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from learner.ranks.activity import Activity
from streamrl.errors import ConfigError
from streamrl.process_memory import return_freed_memory


class Coordinates(NamedTuple):
    """A rank's place on each axis, the slowest first."""

    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Size of every axis, and what follows for each rank: pure arithmetic."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @classmethod
    def from_world_size(
        cls, world: int, *, replicate: int = 1, shard: int | None = None, context: int = 1, tensor: int = 1
    ) -> Mesh:
        """All other processes shard, unless `shard` is given. Raises ConfigError for another number of processes."""
        rest = replicate * context * tensor
        if world % rest or shard not in (None, world // rest):
            named, given = ("", rest) if shard is None else (f"shard={shard}, ", rest * shard)
            raise ConfigError(
                f"{world} learner processes cannot form a learner.mesh of replicate={replicate}, {named}"
                f"context={context}, tensor={tensor}: set launch.num_learner_ranks to "
                f"{'a multiple of ' if shard is None else ''}{given}, or change an axis."
            )
        return cls(replicate, world // rest, context, tensor)

    def on_devices(self, kind: str) -> DeviceMesh:
        """The axes over which parameters are divided, of the process group that was made; a collective call.

        Ranks of the context axis shard, too: each has a part of the gradient of every weight. An axis of size 1 would
        cost a group of its own and change nothing, but for the one that FSDP2 needs.
        """
        axes = {"replicate": self.replicate, "shard": self.shard * self.context, "tensor": self.tensor}
        axes = {axis: size for axis, size in axes.items() if size > 1 or axis == "shard"}
        return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def context_on_devices(self, kind: str) -> dist.ProcessGroup | None:
        """The ranks of this one's context axis, None without others; a collective call."""
        if self.context == 1:
            return None
        axes = {"data": self.dp_size, "context": self.context, "tensor": self.tensor}
        return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes)).get_group("context")

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def dp_size(self) -> int:
        """Shares that a batch is split into."""
        return self.replicate * self.shard

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """The data-parallel rank of every rank."""
        return tuple(rank // (self.context * self.tensor) for rank in range(self.world))

    def coordinates(self, rank: int) -> Coordinates:
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        return Coordinates(*divmod(rank, self.shard), context, tensor)

    def is_first_of_share(self, rank: int) -> bool:
        """One rank of those with the same data: its statistics count."""
        at = self.coordinates(rank)
        return at.context == at.tensor == 0

    def is_first_with(self, rank: int, axes: Iterable[str]) -> bool:
        """One rank of those with the same part of what is divided over these axes: it writes and counts it."""
        at = self.coordinates(rank)
        return not any(place for axis, place in zip(at._fields, at, strict=True) if axis not in axes)


@dataclass(frozen=True)
class Ranks:
    """This process's place in the learner's process group.

    Attributes:
        rank: 0 .. world - 1; rank 0 talks to the hub and writes what is written once.
        mesh: the layout of all ranks.
        device: where this rank computes.
        device_mesh: the axes over which parameters are divided; None in a lone process that does not shard.
        context: the ranks that rows are cut over, None without others.
        activity: what this process does at the moment, for those who watch it.
        timeout_s: a collective that waits longer for another rank raises.
        group: of the collectives below; None is all ranks' own.
    """

    rank: int = 0
    mesh: Mesh = Mesh()
    device: torch.device = torch.device("cpu")
    device_mesh: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    activity: Activity = field(default_factory=Activity, compare=False, repr=False)
    timeout_s: float = 600.0
    group: dist.ProcessGroup | None = None

    @classmethod
    def start(
        cls, device: str = "auto", *, timeout_s: float = 600.0, sharded: bool | None = None,
        axes: Mapping[str, int | None] | None = None,
    ) -> Ranks:
        """Join the process group that torchrun's variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

        Args:
            device: auto, cpu or cuda; cuda takes device number LOCAL_RANK.
            timeout_s: a collective that waits longer for another rank raises.
            sharded: make a process group even for one process, as FSDP2's mixed precision needs; None: on a GPU only.
            axes: of the mesh, as `Mesh.from_world_size` takes them.
        Raises:
            ConfigError: a device that is not here, or axes that give another number of processes.
        """
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        mesh = Mesh.from_world_size(world, **(axes or {}))
        where = _device(device)
        sharded = where.type == "cuda" if sharded is None else sharded
        if mesh.world == 1 and not sharded:
            return cls(rank, mesh, where)
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if mesh.world == 1 else {}
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, timeout=timedelta(seconds=timeout_s), device_id=where if where.type == "cuda" else None, **alone
        )
        divided, context = mesh.on_devices(where.type), mesh.context_on_devices(where.type)
        for group in (*divided.get_all_groups(), *([] if context is None else [context])):  # each has torch's own
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        return cls(rank, mesh, where, divided, context, timeout_s=timeout_s)

    def background_group(self) -> Ranks:
        """The same ranks over another group, for a thread in the background: in one group, collectives of two threads
        would be taken for one another. On the host, so that they do not wait for a GPU either. A collective call."""
        if self.mesh.world == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return replace(self, device=torch.device("cpu"), group=group, activity=Activity())

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The axes that FSDP2 knows."""
        axes = self.device_mesh.mesh_dim_names if self.device_mesh is not None else None
        return self.device_mesh[axes[:-1]] if axes and axes[-1] == "tensor" else self.device_mesh

    def owns(self, tensor: Any) -> bool:
        """Whether it is this rank, of all that hold the same part of a tensor, that writes it and counts it."""
        axes: tuple[str, ...] = ()
        if isinstance(tensor, _dtensor()):
            pairs = zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True)
            axes = tuple(axis for axis, placement in pairs if not placement.is_replicate())
            axes += ("context",) * ("shard" in axes)
        return self.mesh.is_first_with(self.rank, axes)

    @property
    def dp_rank(self) -> int:
        """The number of the batch's share that this rank trains on."""
        return self.mesh.dp_ranks[self.rank]

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    # --- agreement of all ranks ---------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._reduce([0.0])

    def maximum(self, value: float) -> float:
        """The largest `value` of any rank."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def from_rank_zero(self, value: float) -> float:
        """Rank 0's `value`, on every rank."""
        return self._reduce([value if self.rank == 0 else 0.0])[0]

    def bytes_from_rank_zero(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank; what the others pass is ignored."""
        if self.mesh.world == 1:
            return data
        size = int(self.from_rank_zero(float(len(data))))
        if size == 0:
            return b""
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 else torch.empty(
            size, dtype=torch.uint8
        )
        values = values.to(self.device)
        with self.activity.in_collective("broadcast"):
            dist.broadcast(values, src=0, group=self.group)
            return values.cpu().numpy().tobytes()

    def gather_world(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's list, by rank; lists may differ in length (float64, so integers are exact up to 2**53)."""
        world = self.mesh.world
        if world == 1:
            return [list(values)]
        lengths = [int(x) for x in self._reduce([float(len(values)) * (r == self.rank) for r in range(world)])]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.float64, device=self.device)
        padded[: len(values)] = torch.tensor(list(values), dtype=torch.float64)
        everyone = [torch.empty_like(padded) for _ in range(world)]
        with self.activity.in_collective("all_gather"):
            dist.all_gather(everyone, padded, group=self.group)
        return [row.tolist()[:length] for row, length in zip(everyone, lengths, strict=True)]

    # --- sums over the batch and over the model -----------------------------------------------------------------

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sums over data-parallel ranks in float64, entry by entry; the same list on every rank."""
        return self._reduce(values if self.mesh.is_first_of_share(self.rank) else [0.0] * len(values))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The list of every data-parallel rank, by that rank."""
        rows = self.gather_world(values)
        return [row for rank, row in enumerate(rows) if self.mesh.is_first_of_share(rank)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every data-parallel rank, by that rank."""
        if self.mesh.world == 1:
            return [data]
        padded = np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4")  # four at a time: float64 holds them exactly
        rows = self.gather([float(len(data)), *padded.tolist()])
        return [np.array(words, dtype="<u4").tobytes()[: int(length)] for length, *words in rows]

    def add_up(self, values: Tensor) -> Tensor:
        """Sums of an integer tensor over all ranks, entry by entry, modulo its range; on this group's device."""
        values = values.to(self.device)
        if self.mesh.world > 1:
            with self.activity.in_collective("all_reduce"):
                dist.all_reduce(values, group=self.group)
        return values

    def add(self, value: float) -> float:
        """The sum over all ranks in float64."""
        return self._reduce([value])[0]

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
        if self.mesh.world == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        with self.activity.in_collective("all_reduce"):
            dist.all_reduce(tensor, op, group=self.group)
            return tensor.tolist()  # on a GPU it is here that the result is waited for


def leave_device(device: torch.device) -> None:
    """Give the memory back that torch keeps for later: others have the device until the next batch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        return_freed_memory()


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, _dtensor()) else tensor


def placed_as(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided as the parameter is; a row of it may be shorter."""
    if not isinstance(parameter, _dtensor()):
        return part
    width = part.shape[-1] * parameter.shape[-1] // max(1, local_part(parameter.detach()).shape[-1])
    whole = torch.Size((*parameter.shape[:-1], width)) if parameter.dim() > 1 else parameter.shape
    strides = torch.empty(whole, device="meta").stride()
    placement = parameter.device_mesh, parameter.placements
    return _dtensor().from_local(part, *placement, run_check=False, shape=whole, stride=strides)


def _dtensor() -> type[Any]:
    from torch.distributed.tensor import DTensor  # takes longer to import than the check of a run's settings may

    return DTensor


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
