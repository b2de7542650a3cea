"""Causal attention over a packed row: sequences that lie end to end never see one another, and padding is bounded.

The packed tokens [N] are gathered into the blocks of their layout, [sequences, length] with padding on the right, one
call of scaled dot-product attention each, and gathered back. A causal mask is all that is needed: no real query can
look at a later key.

Legend: N packed tokens, H query heads, K key/value heads, D head size, L block length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from learner.data.layout import PackedLayout

ATTENTION = "streamrl_packed"
"""Name under which transformers finds `packed_attention`. No mask function has that name, so models make no mask."""


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    packing: PackedLayout | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' `AttentionInterface`: query [1, H, N, D], key and value [1, K, N, D].

    Returns ([1, N, H, D], None). `packing` reaches it as a keyword of the model's forward, so that a layer recomputed
    in the backward pass gets it too. `dropout` is not applied: a scored token must have the probability that the actor
    recorded for it.
    """
    if packing is None:
        raise ValueError(f"{type(module).__name__} did not pass `packing` on to its attention: model is not supported")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {name} in attention, which packed scoring does not support")
    tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [N, heads, D]
    outputs = []
    for block in packing.blocks:
        padded = [
            (t if packing.block_index is None else t.index_select(0, block.sources))
            .unflatten(0, (-1, block.length)).transpose(1, 2)
            for t in tokens
        ]  # [sequences, heads, L, D]
        outputs.append(_attend(*padded, scaling=scaling, window=sliding_window).transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (joined if packing.block_index is None else joined.index_select(0, packing.block_index))[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention [sequences, heads, L, D], each position seeing at most the last `window` ones."""
    length = query.shape[2]
    shared = query.shape[1] // key.shape[1]
    gqa = shared > 1 and query.is_cuda
    if shared > 1 and not gqa:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    mask = None
    if window is not None and length > window:
        position = torch.arange(length, device=query.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )


AttentionInterface.register(ATTENTION, packed_attention)
