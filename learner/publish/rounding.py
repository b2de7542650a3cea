"""Scoring with the published weights, also where the wire is narrower than the learner's arithmetic.

Where the wire is bfloat16 and the learner computes in float32, actors sample from weights that differ from the masters
by up to 2^-9 of their size, and every log-ratio at lag 0 would hold the rounding. So the weights are rounded for the
passes that score; gradients taken there move the exact masters (a straight-through step), or updates smaller than the
rounding would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from learner.checkpoint.shards import reshard
from learner.ranks.mesh import local_part


@contextmanager
def with_wire_precision(module: nn.Module, *, compute_dtype: torch.dtype, wire_dtype: torch.dtype) -> Iterator[None]:
    """Temporarily give `module` the values that a document of `wire_dtype` holds; restores its own bit for bit.

    Frozen weights were rounded for good, by `round_frozen`. Costs a second copy of this rank's trained float32 shards
    meanwhile; nothing at all where `wire_dtype` holds every value that takes part in the computation (float32 in
    float32, bfloat16 in bfloat16 or float32).
    """
    if torch.promote_types(compute_dtype, wire_dtype) == wire_dtype:
        yield
        return
    def rounded(shards: list[Tensor]) -> None:
        for shard in shards:
            shard.copy_(shard.to(wire_dtype))

    with swapped_weights(module, rounded):
        yield


@contextmanager
def swapped_weights(module: nn.Module, fill: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Temporarily give this rank's trained shards the values that `fill` writes; restores them bit for bit."""
    with torch.no_grad():
        shards = trained_shards(module)
        exact = [shard.clone() for shard in shards]
        fill(shards)
    try:
        yield
    finally:
        reshard(module)
        with torch.no_grad():
            for shard, before in zip(shards, exact, strict=True):
                shard.copy_(before)


def trained_shards(module: nn.Module) -> list[Tensor]:
    """This rank's part of every parameter that is trained."""
    reshard(module)
    return [local_part(parameter.detach()) for parameter in module.parameters() if parameter.requires_grad]


@torch.no_grad()
def round_frozen(module: nn.Module, wire_dtype: torch.dtype) -> None:
    """Give frozen weights the values that a document of `wire_dtype` holds: no update is ever lost by it."""
    reshard(module)
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            shard = local_part(parameter.detach())
            shard.copy_(shard.to(wire_dtype))
