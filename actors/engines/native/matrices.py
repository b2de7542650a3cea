"""Products with the matrices of a version, made once when it is installed.

Linear layers that read one input are one product, where their matrices lie below each other. A large matrix is also
kept in the order that oneDNN's kernels on a CPU read: 1.1 to 2.4 times as fast, for a second copy of it (a third while
a version is installed). In int8 that copy takes a quarter. Its sums are exact, with a scale for each row of the matrix
and one for each token, so that no token depends on those beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor], Tensor]

PACK_FROM = 150_000
"""Elements of a matrix from which on the kernels are faster: below, a call costs more than it gains."""
_PACKED_FOR = 16  # tokens in a pass
_SMALLEST = 1e-30  # the scale of zeros


def lay_below(parameters: Sequence[Tensor]) -> None:
    """Move parameters of one width into one block of memory, each below the one before."""
    parts = [parameter.data for parameter in parameters]
    sizes = [len(part) for part in parts]
    rows = torch.cat(parts).split(sizes)
    for parameter, own in zip(parameters, rows, strict=True):
        parameter.data = own


def below_each_other(tensors: Sequence[Tensor]) -> Tensor:
    """Join matrices of one width: a view where they lie so in memory, else a copy."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return torch.cat(list(tensors))
        end += tensor.nbytes
    num_rows = sum(map(len, tensors))
    shape = (num_rows, *first.shape[1:])
    return first.as_strided(shape, first.stride())


def product(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    int8: bool = False,
) -> Product:
    """The outputs of linear layers beside each other, as a function of their one input.

    Args:
        int8: matrices are rounded to it, and large ones are multiplied in it.
    """
    weight = below_each_other([one.data for one in weights])
    bias = None
    if biases:
        bias = torch.cat([one.data for one in biases])
    if weight.numel() < PACK_FROM:
        return partial(F.linear, weight=weight, bias=bias)
    if int8 and multiplies_bytes():
        return _int8(weight, bias)
    if torch.backends.mkldnn.is_available():
        return _packed(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    kernels = torch.ops.mkldnn
    packed = kernels._reorder_linear_weight(weight, _PACKED_FOR)

    def multiply(inputs: Tensor) -> Tensor:
        return kernels._linear_pointwise(inputs, packed, bias, "none", [], "")

    return multiply


def _int8(weight: Tensor, bias: Tensor | None) -> Product:
    scale = weight.abs().amax(1).div_(127.0).clamp_min_(_SMALLEST)
    levels = (weight / scale[:, None]).round_().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(levels, None)
    zeros = torch.zeros(len(weight), dtype=torch.int32)

    def multiply(inputs: Tensor) -> Tensor:
        largest = inputs.abs().amax(-1, keepdim=True)
        of_token = largest.div_(127.0).clamp_min_(_SMALLEST)
        # To the nearest level from 1 to 255, of which 128 is 0.
        levels = (inputs / of_token).add_(128.5).to(torch.uint8)
        out = _multiply_bytes(levels, packed, scale, zeros)
        out.mul_(of_token)
        return out if bias is None else out.add_(bias)

    return multiply


def _multiply_bytes(levels: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """The product of `levels` - 128 and the packed matrix, times its scales, in float32."""
    return torch.ops.onednn.qlinear_pointwise(
        levels, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def multiplies_bytes() -> bool:
    """Test that this processor adds products of bytes exactly; older ones cut sums of two off at 16 bits."""
    weight = torch.full((32, 128), 127, dtype=torch.int8)
    levels = torch.full((3, 128), 255, dtype=torch.uint8)
    scale = torch.ones(32)
    zeros = torch.zeros(32, dtype=torch.int32)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = _multiply_bytes(levels, packed, scale, zeros)
    except (RuntimeError, AttributeError):
        return False  # this build of torch lacks the operator
    return bool((found == 127 * 127 * 128).all())
