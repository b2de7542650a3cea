"""Buffers that a checkpoint holds in addition to its parameters: the correction bias of a router, the scale of a layer.

No optimizer moves them, and the model's output depends on them as on its weights: they are published, installed and
exported with the weights, each in its own type. Other buffers, as rotary frequencies, follow from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) in module order; one that two modules share has its first name."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that a checkpoint of it holds: parameters, tied ones once, then the saved buffers."""
    yield from module.named_parameters()
    yield from saved_buffers(module)


def keep_buffers_wide(module: nn.Module) -> None:
    """Give saved buffers of a float type float32, as transformers keeps them where rounding would change an expert.

    A module that was made in a narrower type makes its buffers in that type, too.
    """
    for _, buffer in saved_buffers(module):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.float32)
