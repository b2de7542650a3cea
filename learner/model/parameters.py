"""The policy's parameters under the names that its checkpoint has."""

from __future__ import annotations

from functools import reduce

from torch.nn import Module, Parameter

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Parts of a name that checkpointing, compiling and FSDP2 put into it."""


def policy_parameters(model: Module) -> list[tuple[str, Parameter]]:
    """(checkpoint name, parameter) in module order; of tied copies only the first, wrappers' prefixes removed."""
    return [
        (reduce(lambda left, wrapper: left.replace(wrapper, ""), _WRAPPERS, name), parameter)
        for name, parameter in model.named_parameters()
    ]
