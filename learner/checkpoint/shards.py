"""Tensors of a training run as boxes in files: every rank writes its own, any number of ranks reads them back.

A rank's file is safetensors; its header says where in the whole tensor each local shard begins. Nothing is gathered,
and a reader takes from each file just the rows that it needs.

    model/<parameter>              trained weights, and buffers
    optim/<state>/<parameter>      moments (sharded as the parameter), step counts and scales (whole)
    frozen/<name>/<parameter>      weights of a copy that is not trained
    rng/cpu, rng/cuda              generator states of the rank that wrote the file, as bytes
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate

from learner.ranks.mesh import Ranks, local_part
from streamrl.architectures.saved_buffers import saved_buffers
from streamrl.errors import CheckpointError

log = logging.getLogger("streamrl.checkpoint")
_ADAM, _MOMENTUM = {"exp_avg", "exp_avg_sq", "step"}, {"momentum_buffer"}
_STATES = {torch.optim.AdamW: _ADAM, torch.optim.SGD: _MOMENTUM, torch.optim.Muon: _MOMENTUM}
"""States that an optimizer of torch keeps for a weight: given another's, it fails in its first step, or reads codes."""


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: where it begins and how large it is, per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """The common block, or None if there is none."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True))
        size = tuple(h - x for h, x in zip(high, low, strict=True))
        return Box(low, size) if all(n > 0 for n in size) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this block in a tensor that holds `outer`."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.offset, self.shape, outer.offset, strict=True))


def local_box(tensor: Tensor) -> Box:
    """The block of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    return _box(tensor.shape, tensor.device_mesh, tensor.placements)


def _box(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> Box:
    first, size = [0] * len(shape), list(shape)
    for axis, placement in reversed(list(enumerate(placements))):  # FSDP2 divides last, and its axis comes first
        dim = getattr(placement, "dim", None)
        if dim is not None:
            part = math.ceil(size[dim] / mesh.size(axis))
            start = min(mesh.get_local_rank(axis) * part, size[dim])
            first[dim], size[dim] = first[dim] + start, min(part, size[dim] - start)
        elif not placement.is_replicate():
            raise CheckpointError(f"cannot save a tensor placed as {tuple(placements)}: only blocks are written")
    return Box(tuple(first), tuple(size))


def reshard(module: nn.Module) -> None:
    """Free FSDP2's gathered copies, which would hide a change of the shards: of the root, and perhaps of layers."""
    for part in module.modules() if isinstance(module, FSDPModule) else ():
        if isinstance(part, FSDPModule):
            part.reshard()


def training_tensors(
    policy: nn.Module, optimizer: torch.optim.Optimizer, also: Iterable[tuple[str, Tensor]] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) of trained weights, optimizer states, untrained weights and buffers, then `also`; tied ones once.

    Weights under an adapter are those of the model that the run started from, and not saved again.
    """
    reshard(policy)  # a copy that a pass without a backward one gathered has no moments, and is rounded
    for name, parameter in _trained(policy):
        yield f"model/{name}", parameter.detach()
        for state, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"optim/{state}/{name}", _checked_state(state, torch.as_tensor(value), parameter)
    for name, tensor in (*_untrained(policy), *saved_buffers(policy)):
        yield f"model/{name}", tensor.detach()
    yield from also


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The part of a tensor that this rank holds, and its place in it."""

    box: Box
    whole: tuple[int, ...]
    part: Tensor
    divided: bool  # torch knows it as a part

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Block:
        return cls(
            local_box(tensor),
            tuple(tensor.shape),
            local_part(tensor).contiguous(),
            isinstance(tensor, DTensor),
        )


@dataclass(frozen=True, slots=True)
class Copied:
    """Tensors of one moment in host memory, and the states of the random generators at that moment."""

    blocks: tuple[tuple[str, Block], ...]
    generators: Mapping[str, Tensor]


@torch.no_grad()
def copied(tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> Copied:
    """Copy this rank's blocks to the host, from a GPU at the rate of pinned memory: training may go on."""
    blocks, cuda = [], False
    for key, tensor in tensors:
        if not ranks.owns(tensor):
            continue
        block = Block.from_tensor(tensor.detach())
        cuda = cuda or block.part.is_cuda
        target = torch.empty(block.part.shape, dtype=block.part.dtype, pin_memory=block.part.is_cuda)
        target.copy_(block.part, non_blocking=True)
        copy = replace(block, part=target)
        blocks.append((key, copy))
    if cuda:
        torch.cuda.current_stream().synchronize()
    return Copied(tuple(blocks), generator_states())


def generator_states() -> dict[str, Tensor]:
    """States of this process's random generators, as bytes."""
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng/cuda"] = torch.cuda.get_rng_state()
    return states


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _untrained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Weights that no training moves, as the bias of a router in some architectures; none under an adapter."""
    named = list(module.named_parameters())
    adapted = any(".lora_" in name for name, _ in named)
    return [] if adapted else [(name, parameter) for name, parameter in named if not parameter.requires_grad]


def _checked_state(state: str, value: Tensor, parameter: Tensor) -> Tensor:
    """The optimizer's state, checked: a block that only this rank holds would pass for the whole in the files."""
    sharded = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    if sharded and value.dim() and not isinstance(value, DTensor):
        raise CheckpointError(
            f"the optimizer's {state!r} is not sharded as its parameter: it can be saved by one learner rank only"
        )
    return value


def write_shards(path: Path, tensors: Iterable[tuple[str, Tensor]] | Copied, ranks: Ranks) -> None:
    """This rank's blocks, and its random generators, in one safetensors file; of a block that several hold, one's."""
    held = isinstance(tensors, Copied)
    parts: dict[str, Tensor] = dict(tensors.generators if held else generator_states())
    boxes: dict[str, Any] = {}
    own = tensors.blocks if held else (
        (key, Block.from_tensor(tensor)) for key, tensor in tensors if ranks.owns(tensor)
    )
    for key, block in own:
        if math.prod(block.whole) and 0 in block.box.shape:
            continue  # this rank got no rows of a small tensor
        parts[key] = block.part
        boxes[key] = {
            "offset": block.box.offset,
            "whole": block.whole,
            "divided": block.divided,
        }
    save_file(parts, path, metadata={"boxes": json.dumps(boxes)})


class ShardReader:
    """Blocks out of the files of all ranks that wrote a checkpoint, given by rank."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._parts: dict[str, list[tuple[Any, Box]]] = {}
        self._whole: dict[str, tuple[int, ...]] = {}
        self._divided: set[str] = set()
        for file in self._files:
            for key, entry in json.loads(file.metadata()["boxes"]).items():
                shape = tuple(file.get_slice(key).get_shape())
                self._parts.setdefault(key, []).append((file, Box(tuple(entry["offset"]), shape)))
                self._whole[key] = tuple(entry["whole"])
                if entry.get("divided"):
                    self._divided.add(key)

    def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self._parts if key.startswith(prefix)]

    def has(self, prefix: str) -> bool:
        return bool(self.keys(prefix))

    def read_into(self, key: str, target: Tensor) -> None:
        """Fill this rank's part of `target`.

        Raises CheckpointError: no such tensor, another shape, or rows that no file holds.
        """
        if key not in self._parts:
            raise CheckpointError(f"the checkpoint has no tensor {key!r}: it belongs to another model")
        if self._whole[key] != tuple(target.shape):
            raise CheckpointError(
                f"{key!r} is {list(self._whole[key])} in the checkpoint and {list(target.shape)} here: another model"
            )
        wanted, local = local_box(target), local_part(target)
        filled = 0
        for file, box in self._parts[key]:
            if not box.shape:
                local.copy_(file.get_tensor(key))
                return
            common = wanted.overlap(box)
            if common is not None and filled < local.numel():
                local[common.within(wanted)] = file.get_slice(key)[common.within(box)].to(local.device)
                filled += math.prod(common.shape)
        if filled < local.numel():
            raise CheckpointError(f"{key!r}: the files hold {filled} of the {local.numel()} numbers needed here")

    def read_whole(self, key: str) -> Tensor:
        """A tensor that every rank wrote in full."""
        return self._parts[key][0][0].get_tensor(key)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._whole[key]

    def divided(self, key: str) -> bool:
        """Whether each rank knew its block as a part; older checkpoints do not tell."""
        return key in self._divided

    def dtype(self, key: str) -> torch.dtype:
        file, box = self._parts[key][0]
        return (file.get_slice(key)[:0] if box.shape else file.get_tensor(key)).dtype

    def generator_states(self, rank: int) -> Mapping[str, Tensor]:
        """States of the rank with that number, or of rank 0 if there were fewer ranks."""
        file = self._files[rank if rank < len(self._files) else 0]
        return {key: file.get_tensor(key) for key in file.keys() if key.startswith("rng/")}  # noqa: SIM118


@torch.no_grad()
def read_training_tensors(
    reader: ShardReader, module: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = ""
) -> None:
    """Fill a module and its optimizer with the tensors of `training_tensors`, under keys that begin with `prefix`.

    Moments of another optimizer are left out, with a warning. Raises CheckpointError: a tensor is missing, of another
    shape, or of a weight that is not trained here.
    """
    reshard(module)
    keys = [key.removeprefix(prefix) for key in reader.keys(f"{prefix}optim/")]
    buffers, untrained, there = list(saved_buffers(module)), _untrained(module), reader.keys(f"{prefix}model/")
    asked = {f"{prefix}model/{name}" for name, _ in (*buffers, *untrained, *_trained(module))}
    if unasked := [key for key in there if key not in asked]:
        raise CheckpointError(
            f"the checkpoint has {len(unasked)} tensors that are not trained here, as {unasked[0]!r}: it belongs to "
            "another model"
        )
    for name, tensor in (*buffers, *untrained):
        if f"{prefix}model/{name}" in there:  # an older checkpoint lacks some: no training has moved them
            reader.read_into(f"{prefix}model/{name}", tensor.detach())
    owners, num_others = _owners(optimizer), 0
    for name, parameter in _trained(module):
        reader.read_into(f"{prefix}model/{name}", parameter.detach())
        beside = reader.divided(f"{prefix}model/{name}")
        states = sorted(key.split("/")[1] for key in keys if key.split("/", 2)[2] == name)
        optimizer.state.pop(parameter, None)
        if states and not _takes(owners.get(parameter, optimizer), {*states}):
            states, num_others = [], num_others + 1
        for state in states:
            optimizer.state[parameter][state] = _state_like(
                reader,
                f"{prefix}optim/{state}/{name}",
                parameter,
                beside=beside,
            )
        if states and hasattr(optimizer, "park"):  # `OffloadedOptimizer`: a GPU may not have room for all of them
            optimizer.park(parameter)
    if num_others:
        log.warning("the checkpoint has moments of another optimizer for %d weights: they begin anew", num_others)


def _owners(optimizer: torch.optim.Optimizer) -> dict[Tensor, torch.optim.Optimizer]:
    """The optimizer that steps each weight."""
    members = getattr(optimizer, "members", [optimizer])
    return {weight: member for member in members for group in member.param_groups for weight in group["params"]}


def _takes(optimizer: torch.optim.Optimizer, names: set[str]) -> bool:
    """Tell whether states of these names are its own; of a user's optimizer, which may tell by `takes`, all are."""
    takes, largest = getattr(optimizer, "takes", None), {"max_exp_avg_sq"}
    if takes is not None:
        return takes(names)
    if optimizer.defaults.get("amsgrad") and not largest <= names:
        return False
    return names - largest == _STATES.get(type(optimizer), names - largest)


def _state_like(
    reader: ShardReader,
    key: str,
    parameter: Tensor,
    *,
    beside: bool,
) -> Tensor:
    """A state of an optimizer: divided among ranks as its weight is, along the dimensions that it has of it.

    A count is whole, and so is another shape than that of rows, columns or scales, or what was whole `beside` a divided
    weight.
    """
    shape, dtype = reader.shape(key), reader.dtype(key)
    placed = isinstance(parameter, DTensor)
    if placed and not reader.divided(key):
        alike = _is_of(shape, tuple(parameter.shape))
        placed = alike and not beside
    if placed:
        state = _divided_as(parameter, shape, dtype)
    else:
        state = torch.zeros(
            shape,
            dtype=dtype,
            device=parameter.device,
        )
    reader.read_into(key, state)
    return state


def _is_of(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Tell whether a state has the dimensions of its weight or some of them: of each number, of rows or of columns."""
    size = len(shape)
    if not 0 < size < len(whole):
        pairs = zip(shape, whole, strict=False)
        same = all(one in (1, most) for one, most in pairs)
        scales = shape[:-1] == whole[:-1] != ()
        return size == len(whole) and (same or scales)
    return shape in (whole[:size], whole[-size:])


def _divided_as(
    parameter: DTensor,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Zeros of this shape; each rank has a part along the dimensions that are the parameter's, or its scales'."""
    mesh, whole = parameter.device_mesh, parameter.shape
    last = len(whole) - 1

    def divides(axis: int, dim: int | None) -> bool:
        if dim is None or dim >= len(shape):
            return False
        if shape[dim] == whole[dim]:
            return True
        scales = dim == last and shape[:dim] == whole[:dim]
        return scales and shape[dim] % mesh.size(axis) == 0

    placed = [
        one
        if divides(axis, getattr(one, "dim", None))
        else Replicate()
        for axis, one in enumerate(parameter.placements)
    ]
    part = torch.zeros(
        _box(shape, mesh, placed).shape,
        dtype=dtype,
        device=local_part(parameter.detach()).device,
    )
    return DTensor.from_local(
        part,
        mesh,
        placed,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
