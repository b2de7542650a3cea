"""The choice of attention kernel: `learner.attention`, or the one that fits device and type.

    sdpa                blocks with scaled_dot_product_attention: any device, type and model
    flex_attention      FlexAttention: a CUDA device
    varlen              PyTorch's flash kernel: a CUDA device and half precision
    flash_attention_2   the same of the package flash-attn
    flash_attention_3   the same of the package flash_attn_interface, on Hopper

None but sdpa is taken on trust: before a run, a small layer is computed with it and with sdpa on the run's device and
in its type.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from learner.data.layout import make_layout
from learner.model.attention.blocks import attend_in_blocks
from learner.model.attention.flex import attend_flex
from learner.model.attention.varlen import attend_varlen, flash_attention_2, flash_attention_3, torch_varlen
from streamrl.architectures.masks import CAUSAL
from streamrl.errors import ConfigError

log = logging.getLogger("streamrl.learner")

Attention = Callable[..., Tensor]
"""(query [N, H, D], key [N, K, D], value, layout, rule, **options of `attend`) to [N, H, D]."""

ATTENTIONS: Mapping[str, Attention] = MappingProxyType({
    "sdpa": attend_in_blocks,
    "flex_attention": attend_flex,
    "varlen": partial(attend_varlen, torch_varlen),
    "flash_attention_2": partial(attend_varlen, flash_attention_2),
    "flash_attention_3": partial(attend_varlen, flash_attention_3),
})
AUTO = "auto"
_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_HALF = (torch.bfloat16, torch.float16)
_MOST_DIFFERENCE = 0.05  # of an output or gradient of order 1, in half precision


def choose_attention(wish: str, *, device: torch.device, dtype: torch.dtype) -> str:
    """A key of `ATTENTIONS`.

    Args:
        wish: the same, or "auto": `varlen` on a CUDA device in half precision if it passes the check, else `sdpa`.
    Raises:
        ConfigError: an unknown name, or one that cannot be computed here.
    """
    if wish not in (AUTO, *ATTENTIONS):
        raise ConfigError(f"learner.attention={wish!r} is unknown: choose one of {', '.join((AUTO, *ATTENTIONS))}.")
    if wish == AUTO:
        if device.type != "cuda" or dtype not in _HALF:
            return "sdpa"
        reason = why_not("varlen", device=device, dtype=dtype)
        if reason:
            log.warning("attention is sdpa, because varlen %s", reason)
        return "sdpa" if reason else "varlen"
    if wish != "sdpa" and (reason := why_not(wish, device=device, dtype=dtype)):
        raise ConfigError(f"learner.attention={wish} {reason}: set learner.attention=auto or sdpa.")
    return wish


def why_not(name: str, *, device: torch.device, dtype: torch.dtype) -> str:
    """Why this attention cannot be computed here; empty if it can."""
    if device.type != "cuda":
        return f"needs a CUDA device and this is {device.type}: its kernels have no backward pass elsewhere"
    if name != "flex_attention" and dtype not in _HALF:
        return f"computes in half precision only and the policy's type is {dtype} (policy.dtype=bfloat16)"
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"needs the package {package}, which is not installed"
    try:
        difference = difference_from_sdpa(name, device=device, dtype=dtype)
    except Exception as error:  # whatever a kernel says of this device
        return f"does not run on this device: {type(error).__name__}: {error}"
    return "" if difference <= _MOST_DIFFERENCE else f"differs from sdpa by {difference:.2g} on this device"


def difference_from_sdpa(name: str, *, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference of outputs and gradients on a row with a shared prompt, which continues another beginning."""
    generator = torch.Generator().manual_seed(0)
    packing = make_layout([70, 9, 18, 20, 15], [-1, 0, 1, 1, -1]).to(device)
    inputs = [torch.randn(132, heads, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2)]
    found = []
    for kind in ("sdpa", name):
        mine = [tensor.clone().requires_grad_() for tensor in inputs]
        out = ATTENTIONS[kind](*mine, packing, CAUSAL)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), mine)])
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(*found, strict=True))
