"""Stand-ins for what fake tensors cannot run: they hold the memory of the real thing, and compute nothing.

    flash_attention    keeps inputs, output and a number a row and head, as the flash kernels of a GPU do
    QuantizedLinear    a frozen layer in 4 or 8 bits, which is made whole while it computes
    grouped_product    of experts in float32, for which torch only has half precision without memory
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learner.data.layout import PackedLayout
from learner.model.attention.kernels import attend_in_blocks
from streamrl.architectures.attention import MaskRule
from streamrl.config.schema import LoraBase

QUANTIZED_BYTES = {LoraBase.int8: 1.0, LoraBase.nf4: 0.5 + (1 + 4 / 256) / 64}
"""Bytes a weight of a frozen linear layer. nf4 has a byte for 64 weights, and a float32 for 256 of those bytes."""


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedLayout, rule: MaskRule, *, scaling: float | None = None,
    **extras: Any,
) -> Tensor:
    """[N, H, E]; what the kernels do not know, as sinks, is computed in blocks as in a run."""
    if extras:
        return attend_in_blocks(query, key, value, packing, rule, scaling=scaling, **extras)
    return _Flash.apply(query, key, value)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[2])
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, log_sums = ctx.saved_tensors
        held = torch.empty_like(query, dtype=torch.float32), torch.empty_like(log_sums)
        found = tuple(map(torch.empty_like, (query, key, value)))
        del held
        return found


class QuantizedLinear(nn.Linear):
    """In place of a linear layer."""

    def __init__(self, layer: nn.Linear, how: LoraBase) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.bias = layer.bias
        nbytes = int(QUANTIZED_BYTES[how] * layer.weight.numel())
        self.weight = nn.Parameter(torch.empty(nbytes, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return _MadeWhole.apply(x, self.out_features)


class _MadeWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = x.shape[-1]
        return x @ x.new_empty(x.shape[-1], width)

    @staticmethod
    def backward(ctx: Any, down: Tensor) -> tuple[Tensor, None]:
        return down @ down.new_empty(down.shape[-1], ctx.width), None


def quantize(model: Any, how: LoraBase) -> None:
    """Replace the layers that `learner.model.adapter.lora` would."""
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, QuantizedLinear(layer, how))


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The shape of `torch._grouped_mm`: rows by matrices, and both gradients of it."""
    if left.dim() == right.dim() == 2:
        return left.new_empty(offsets.numel(), left.shape[0], right.shape[1])
    return left.new_empty(left.shape[-2], right.shape[-1])
