"""Context parallelism: each rank of an axis computes an equal part of a packed row, in the row's order.

Tokens meet in attention alone. There the keys and values of all parts are gathered, and their gradients added up for
the rank of each. What a part sees of them is in its layout (`cut_layout`): every mask rule and every kernel is exact.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.data.layout import PackedLayout, cut_layout

AXIS = "context_axis"
"""The attribute of a decoder with the process group that its rows are cut over."""


def cut(tokens: Tensor, positions: Tensor, packing: PackedLayout, axis: Any) -> tuple[Tensor, Tensor, PackedLayout]:
    """This rank's part of a row; tokens that see only themselves fill the last one up."""
    width = -(-len(tokens) // axis.size())
    part, padding = slice(axis.rank() * width, (axis.rank() + 1) * width), (0, width * axis.size() - len(tokens))
    layout = packing.kept(("cut", axis), lambda: cut_layout(
        packing, part.start, part.stop, padding=padding[1], gather=partial(gather, axis=axis)
    ).to(tokens.device))
    return *(torch.nn.functional.pad(tensor, padding)[part] for tensor in (tokens, positions)), layout


def gather(part: Tensor, axis: Any) -> Tensor:
    """The parts of all ranks, one after another; differentiable, a collective call in both passes."""
    found = _Gather.apply(part, axis)
    assert isinstance(found, Tensor)
    return found


# Under their names before torch 2.13 both warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Any) -> Tensor:
        ctx.axis = axis
        whole = part.new_empty(axis.size() * len(part), *part.shape[1:])
        _all_gather(whole, part.contiguous(), group=axis)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part = gradient.new_empty(len(gradient) // ctx.axis.size(), *gradient.shape[1:])
        _reduce_scatter(part, gradient.contiguous(), group=ctx.axis)
        return part, None
