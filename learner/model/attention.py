"""Causal attention over a packed row: sequences that lie end to end never see one another, and padding is bounded.

The packed tokens [N] are gathered into a few right-padded blocks [sequences, length], one call of scaled dot-product
attention each, and gathered back. With padding on the right a causal mask is all that is needed: no real query can look
at a later key. Blocks are chosen so that each holds less than twice the attention area that its sequences need.

Legend: N packed tokens, H query heads, K key/value heads, D head size, L block length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "streamrl_packed"
"""Name under which transformers finds `packed_attention`. No mask function has that name, so models make no mask."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Sequences of similar length, padded to one."""

    length: int  # L
    sources: Tensor  # int64 [sequences * L]: the packed token in each slot; any token in padding slots


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """How one packed row falls apart into blocks; made once per micro-batch, used in every layer.

    Attributes:
        lengths: tokens of each sequence, in packed order.
        slots: int64 [N], where each packed token lies in the concatenated blocks; None if one block is the row itself.
    """

    lengths: tuple[int, ...]
    blocks: tuple[Block, ...]
    slots: Tensor | None

    @property
    def padded_area(self) -> int:
        """Query-key pairs computed, the sum of sequences * L^2 over blocks; the need is the sum of squared lengths."""
        return sum(block.sources.numel() * block.length for block in self.blocks)

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout on `device`."""
        blocks = tuple(Block(block.length, block.sources.to(device)) for block in self.blocks)
        return PackedLayout(self.lengths, blocks, None if self.slots is None else self.slots.to(device))


def make_layout(lengths: Sequence[int]) -> PackedLayout:
    """Sort sequences into blocks.

    Longest first, a block takes the next sequence while its padded area stays below twice the need of its members.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    slots = torch.empty(starts[-1], dtype=torch.int64)
    blocks: list[Block] = []
    first_slot = 0
    for members in _group_by_length(lengths):
        width = lengths[members[0]]
        begin = torch.tensor([starts[i] for i in members])[:, None]
        size = torch.tensor([lengths[i] for i in members])[:, None]
        offsets = torch.arange(width)[None, :]
        real = offsets < size
        sources = torch.where(real, begin + offsets, begin).flatten()
        slots[sources[real.flatten()]] = first_slot + real.flatten().nonzero().squeeze(1)
        blocks.append(Block(width, sources))
        first_slot += sources.numel()
    identity = len(blocks) == 1 and torch.equal(blocks[0].sources, torch.arange(starts[-1]))
    return PackedLayout(tuple(lengths), tuple(blocks), None if identity else slots)


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    need = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        square = lengths[index] ** 2
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] ** 2 < 2 * (need + square):
            groups[-1].append(index)
            need += square
        else:
            groups.append([index])
            need = square
    return groups


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, N, D]
    value: Tensor,  # [1, K, N, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' `AttentionInterface`; returns ([1, N, H, D], None).

    `packing` reaches it as a keyword of the model's forward, so that a layer recomputed in the backward pass gets it
    too. `dropout` is not applied: a scored token must have the probability that the actor recorded for it.
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
            (t if packing.slots is None else t.index_select(0, block.sources))
            .unflatten(0, (-1, block.length)).transpose(1, 2)
            for t in tokens
        ]  # [sequences, heads, L, D]
        outputs.append(_attend(*padded, scaling=scaling, window=sliding_window).transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (joined if packing.slots is None else joined.index_select(0, packing.slots))[None], None


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
