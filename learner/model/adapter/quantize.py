"""QLoRA: the frozen linear layers in 4 or 8 bits, by bitsandbytes.

Actors get the weights that the learner computes with, which are the dequantized ones: a quantized base changes no
ratio. On a GPU the layers of `int8` also round their inputs, which actors do not.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from learner.model.policy import Policy
from streamrl.config.schema import LoraBase
from streamrl.errors import ConfigError


class Dequantized:
    """A quantized weight as what it stands for; made whole when it is asked for."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.shape = torch.Size((layer.out_features, layer.in_features))

    def full_tensor(self) -> Tensor:
        """[out, in] in the type that the layer computes with."""
        from peft.utils.integrations import dequantize_bnb_weight

        return dequantize_bnb_weight(self._layer.weight, state=getattr(self._layer, "state", None))


def check_quantization(how: LoraBase) -> None:
    """Raise ConfigError without bitsandbytes."""
    if how is not LoraBase.none and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"policy.lora.base_quantization={how.name} needs the package bitsandbytes: pip install 'streamrl[qlora]', "
            "or leave it at none."
        )


def quantize(policy: Policy, how: LoraBase, dtype: torch.dtype) -> None:
    """Put every linear layer but the output layer into `how`; before adapters are added.

    Args:
        dtype: of the computation.
    """
    check_quantization(how)
    head = policy.model.get_output_embeddings()
    for name, layer in list(policy.model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            parent, _, own = name.rpartition(".")
            setattr(policy.model.get_submodule(parent), own, _quantized(layer, how, dtype))
    policy.is_loaded_in_4bit = how is LoraBase.nf4  # peft chooses its layers by these
    policy.is_loaded_in_8bit = how is LoraBase.int8


def _quantized(layer: nn.Linear, how: LoraBase, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes

    weight, sizes = layer.weight.detach(), (layer.in_features, layer.out_features, layer.bias is not None)
    if how is LoraBase.nf4:
        made = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
        made.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    else:
        made = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
        made.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made.to(weight.device)  # which quantizes


def dequantized(module: nn.Module) -> dict[int, Dequantized]:
    """Id of a quantized weight -> what it stands for."""
    return {
        id(layer.weight): Dequantized(layer) for layer in module.modules()
        if isinstance(layer, nn.Linear) and not layer.weight.is_floating_point()
    }
