"""Attention of a packed row, by the kernel of `learner.attention` or the one that fits device and type.

    sdpa                padded blocks with scaled_dot_product_attention: any device, type, model and mask rule
    eager               the same blocks with plain matrix products: to look at, or to compare a kernel with
    flex_attention      FlexAttention, with a block mask that skips what no token sees: a CUDA device
    varlen              PyTorch's flash kernel (torch.nn.attention.varlen): a CUDA device and half precision
    flash_attention_2   the same of the package flash-attn
    flash_attention_3   the same of the package flash_attn_interface, on Hopper

Others than these two are not taken on trust: before a run, a small layer is computed with one and with sdpa on the
run's device and in its type. What they cannot do is computed in blocks: the packed tokens are gathered into the blocks
of their layout, [sequences, length] with padding on the right, one call of attention each, and gathered back. The keys
of a sequence that continues another are those of that one, then its own.

Legend: N packed tokens, M keys, H query heads, K key/value heads, D head size, S sequences of a block, L block length,
P most tokens that a sequence of the block continues.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.data.layout import Block, PackedLayout, make_layout
from streamrl.architectures.attention import CAUSAL, MaskRule, attend
from streamrl.errors import ConfigError
from streamrl.weights.gpu.pinned import upload


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedLayout, rule: MaskRule, **options: Any
) -> Tensor:
    """[N, H, D] of query [N, H, D], key and value [N, K, D]; `options` are those of `attend`."""
    gathers = packing.block_index is not None
    outputs = []
    for block in packing.blocks:
        more = block.continued
        of_queries = block.sources if gathers else None
        if more is None:
            of_keys = [_padded(tokens, of_queries, block.length) for tokens in (key, value)]
        else:
            of_keys = [_rows(gather(tokens, more.key_sources), more.num_keys) for tokens in (key, value)]
        outputs.append(attend(
            _padded(query, of_queries, block.length), *of_keys, mask=_mask(block, packing, rule), **options,
        ).transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if packing.block_index is None else joined.index_select(0, packing.block_index)


def gather(tokens: Tensor, sources: Tensor) -> Tensor:
    """[M, ...] of packed tokens [N, ...]: keys, of which many sequences may continue the same.

    The backward pass adds up the gradients of a token in float32 if they are in half precision.
    """
    return _Gather.apply(tokens, sources)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.num_tokens = len(tokens)
        return tokens.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (sources,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        added = torch.zeros(ctx.num_tokens, *gradient.shape[1:], dtype=wide, device=gradient.device)
        return added.index_add_(0, sources, gradient.to(wide)).to(gradient.dtype), None


def _padded(tokens: Tensor, sources: Tensor | None, length: int) -> Tensor:
    """[S, heads, length, D] of packed tokens [N, heads, D]."""
    return _rows(tokens if sources is None else tokens.index_select(0, sources), length)


def _rows(tokens: Tensor, length: int) -> Tensor:
    return tokens.unflatten(0, (-1, length)).transpose(1, 2)


def _mask(block: Block, packing: PackedLayout, rule: MaskRule) -> Tensor | None:
    """bool [S, 1, L, P + L] or [L, L], True where a query sees a key; None is plain causal."""
    more = block.continued
    if more is None:
        return None if rule.is_causal(block.length) else rule.square(block.length, block.sources.device)
    # No real query can look at padding, because a rule hides later positions.
    return packing.kept((rule, block), lambda: rule.visible(
        more.query_positions[:, None, :, None], more.key_positions[:, None, None, :]
    ))


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedLayout, rule: MaskRule, *,
    scaling: float | None = None, softcap: float | None = None, **extras: Any,
) -> Tensor:
    """[N, H, D] of query [N, H, D], key and value [N, K, D]; `extras` are those of `attend`."""
    if extras or packing.gather is not None:  # its block mask is about whole rows
        return attend_in_blocks(query, key, value, packing, rule, scaling=scaling, softcap=softcap, **extras)

    def capped(score: Tensor, *_places: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    function, compiled = _function(query.is_cuda), query.is_cuda
    found = function(
        *(t.transpose(0, 1)[None] for t in (query, key, value)), score_mod=None if softcap is None else capped,
        block_mask=packing.kept(("flex", rule), lambda: _block_mask(packing, rule, query.device, compiled)),
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
    )
    return found[0].transpose(0, 1)


@cache
def _function(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler, which takes a second

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def _block_mask(packing: PackedLayout, rule: MaskRule, device: torch.device, compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    lengths, parents = packing.lengths, packing.parents or (-1,) * len(packing.lengths)
    sizes, starts = torch.tensor(lengths), torch.tensor([0, *accumulate(lengths)][:-1])
    before = torch.tensor([len(keys) for keys in packing.key_places] or lengths) - sizes
    # The sequence of each token, the one that it continues, and so on to the first.
    numbers = list(range(len(lengths)))
    chain = [upload(torch.tensor(numbers).repeat_interleave(sizes), device)]
    while max(numbers := [parents[number] if number >= 0 else -1 for number in numbers]) >= 0:
        chain.append(upload(torch.tensor(numbers).repeat_interleave(sizes), device))
    position = upload(torch.arange(sum(lengths)) + (before - starts).repeat_interleave(sizes), device)

    def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = chain[0][query] == chain[0][key]
        for continued in chain[1:]:
            near = near | (continued[query] == chain[0][key])
        return near & rule.visible(position[query], position[key])

    size = len(position)
    return create_block_mask(seen, None, None, size, size, device=str(device), _compile=compiled)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """The ends of the sequences of queries and keys, as the kernels take them."""

    queries: Tensor  # int32 [sequences + 1], from 0
    keys: Tensor  # int32 [sequences + 1], from 0
    most_queries: int
    most_keys: int
    key_sources: Tensor | None  # int64 [M] the packed token of each key; None: keys are the packed tokens


Kernel = Callable[[Tensor, Tensor, Tensor, Ends, float | None, int], Tensor]
"""(query [N, H, D], key [M, K, D], value, ends, scale, tokens that each sees to its left or -1) to [N, H, D]."""


def attend_varlen(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, packing: PackedLayout, rule: MaskRule, *,
    scaling: float | None = None, **extras: Any,
) -> Tensor:
    """[N, H, D] of query [N, H, D], key and value [N, K, D]; `extras` are those of `attend`."""
    ends = packing.kept(("varlen", query.device), lambda: ends_of(packing, query.device))
    causal, window = rule.is_causal(ends.most_keys), rule.window
    if not (causal or window) or extras or key.shape[-1] != value.shape[-1]:
        return attend_in_blocks(query, key, value, packing, rule, scaling=scaling, **extras)
    if ends.key_sources is not None:
        key, value = gather(key, ends.key_sources), gather(value, ends.key_sources)
    left = -1 if causal or window is None else window - 1
    return kernel(query.contiguous(), key.contiguous(), value.contiguous(), ends, scaling, left)


def ends_of(packing: PackedLayout, device: torch.device) -> Ends:
    """The ends of a layout's sequences, in packed order."""
    lengths = packing.lengths
    num_keys, sources = lengths, None
    if packing.key_places:
        num_keys = tuple(map(len, packing.key_places))
        sources = upload(torch.from_numpy(np.concatenate(packing.key_places)), device)

    def ends(sizes: tuple[int, ...]) -> Tensor:
        return upload(torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32), device)

    return Ends(ends(lengths), ends(num_keys), max(lengths), max(num_keys), sources)


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, left: int) -> Tensor:
    """The flash kernel that comes with PyTorch."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no such argument and compares no numbers of heads; later releases refuse unequal ones without it.
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] and _takes_gqa(varlen_attn) else {}
    found = varlen_attn(
        query, key, value, ends.queries, ends.keys, ends.most_queries, ends.most_keys, scale=scale,
        window_size=(left, 0), **grouped,
    )
    assert isinstance(found, Tensor)
    return found


@cache
def _takes_gqa(function: Callable[..., Any]) -> bool:
    return "enable_gqa" in inspect.signature(function).parameters


def flash_attention_2(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, left: int) -> Tensor:
    """The kernel of the package flash-attn."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query, key, value, ends.queries, ends.keys, ends.most_queries, ends.most_keys, softmax_scale=scale, causal=True,
        window_size=(left, 0 if left >= 0 else -1),
    )


def flash_attention_3(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None, left: int) -> Tensor:
    """The kernel of the package flash_attn_interface, for Hopper."""
    from flash_attn_interface import flash_attn_varlen_func

    found = flash_attn_varlen_func(
        query, key, value, ends.queries, ends.keys, ends.most_queries, ends.most_keys, softmax_scale=scale, causal=True,
        window_size=(left, 0 if left >= 0 else -1),
    )
    return found[0] if isinstance(found, tuple) else found  # some versions return the log-sums too


log = logging.getLogger("streamrl.learner")

Attention = Callable[..., Tensor]
"""(query [N, H, D], key [N, K, D], value, layout, rule, **options of `attend`) to [N, H, D]."""

ATTENTIONS: Mapping[str, Attention] = MappingProxyType({
    "sdpa": attend_in_blocks,
    "flex_attention": attend_flex,
    "varlen": partial(attend_varlen, torch_varlen),
    "flash_attention_2": partial(attend_varlen, flash_attention_2),
    "flash_attention_3": partial(attend_varlen, flash_attention_3),
    "eager": partial(attend_in_blocks, fused=False),
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
    if wish not in ("sdpa", "eager") and (reason := why_not(wish, device=device, dtype=dtype)):
        raise ConfigError(f"learner.attention={wish} {reason}: set learner.attention=auto or sdpa.")
    return wish


def why_not(name: str, *, device: torch.device, dtype: torch.dtype) -> str:
    """Why this attention cannot be computed here; empty if it can."""
    if device.type != "cuda":
        return f"needs a CUDA device but this is {device.type}: its kernels have no backward pass elsewhere"
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
