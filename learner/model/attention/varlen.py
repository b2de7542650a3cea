"""Attention of a packed row by kernels for sequences of different length: nothing is padded and no mask is made.

    varlen              PyTorch's own (torch.nn.attention.varlen)      flash_attention_2    package flash-attn
                                                                       flash_attention_3    package flash_attn_interface

A kernel aligns a sequence of queries with the end of its keys. So the keys of a sequence that continues another are
gathered behind one another: those of the other one, then its own. What a kernel cannot do is computed in blocks.

Legend: N packed tokens, M keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.data.layout import PackedLayout
from learner.model.attention.blocks import attend_in_blocks, gather
from streamrl.architectures.masks import MaskRule


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
        sources = torch.from_numpy(np.concatenate(packing.key_places)).to(device)

    def ends(sizes: tuple[int, ...]) -> Tensor:
        return torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32, device=device)

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
