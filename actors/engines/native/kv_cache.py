"""Keys and values of the running sequences: one preallocated tensor a layer, one row a slot.

Rows 0..n-1 belong to the n running sequences, so a decode step reads a plain slice. Values behind a row's length are
left over from earlier sequences; the masks in `attention` keep them out of every result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LayerShape(NamedTuple):
    """What one attention layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class SlotCache:
    """keys[layer] is [slots, kv_heads, max_tokens, key_dim]; values[layer] the same with value_dim."""

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, max_tokens: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self.slots = slots
        self.max_tokens = max_tokens

        def rows(kv_heads: int, dim: int) -> Tensor:
            return torch.zeros(slots, kv_heads, max_tokens, dim, dtype=dtype, device=device)

        self.keys = [rows(shape.kv_heads, shape.key_dim) for shape in layers]
        self.values = [rows(shape.kv_heads, shape.value_dim) for shape in layers]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def put_tokens(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Store one token a row. index [n * kv_heads] from `token_index`; key and value [n, kv_heads, dim]."""
        shape = self.layers[layer]
        self.keys[layer].view(-1, shape.key_dim).index_copy_(0, index, key.reshape(-1, shape.key_dim))
        self.values[layer].view(-1, shape.value_dim).index_copy_(0, index, value.reshape(-1, shape.value_dim))

    def token_index(self, kv_heads: int, positions: Tensor) -> Tensor:
        """Where the tokens at `positions` [n] of rows 0.. lie in a layer seen as [slots * kv_heads * tokens, dim]."""
        lanes = torch.arange(positions.shape[0] * kv_heads, device=positions.device)
        return lanes.mul_(self.max_tokens).add_(positions.repeat_interleave(kv_heads))

    def put_prompt(self, layer: int, row: int, key: Tensor, value: Tensor) -> None:
        """Store a row from its start; key and value [kv_heads, tokens, dim]."""
        self.keys[layer][row, :, : key.shape[1]] = key
        self.values[layer][row, :, : key.shape[1]] = value

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` of one row into another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def scrub(self, lengths: Sequence[int]) -> None:
        """Zero everything that no running row (0..len(lengths)-1) owns: a masked NaN still spoils a weighted sum."""
        for tensor in (*self.keys, *self.values):
            for row, length in enumerate(lengths):
                tensor[row, :, length:] = 0
            tensor[len(lengths) :] = 0
