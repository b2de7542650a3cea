"""The policy's tensors under the names that its checkpoint has."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from streamrl.architectures.saved_buffers import saved_buffers

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Parts of a name that checkpointing, compiling and FSDP2 put into it."""


def policy_parameters(model: Module) -> list[tuple[str, Parameter]]:
    """(checkpoint name, parameter) in module order; of tied copies only the first, wrappers' prefixes removed."""
    return [(_checkpoint_name(name), parameter) for name, parameter in model.named_parameters()]


def policy_tensors(model: Module) -> list[tuple[str, Tensor]]:
    """All that a checkpoint of it holds: `policy_parameters`, then the saved buffers."""
    buffers = [(_checkpoint_name(name), buffer) for name, buffer in saved_buffers(model)]
    return [*policy_parameters(model), *buffers]


def travels_as(tensor: Any, dtype: torch.dtype) -> torch.dtype:
    """The type in which a tensor leaves the learner: a weight in `dtype`, a buffer in its own.

    A buffer is no master that is rounded in every pass: rounded, it would send tokens to other experts than here.
    """
    return tensor.dtype if isinstance(tensor, Tensor) and not isinstance(tensor, Parameter) else dtype


def _checkpoint_name(name: str) -> str:
    return reduce(lambda left, wrapper: left.replace(wrapper, ""), _WRAPPERS, name)
