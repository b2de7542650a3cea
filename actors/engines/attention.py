"""The attention that the model's layers call: over the slot cache when decoding, causal over the prompts when reading.

A forward pass carries a *view*, passed through the model as the keyword `slot_view`. The view knows where this pass
reads and writes; the layer's own code computes projections, norms and rotations, so any architecture that calls its
attention through the interface works unchanged.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.engines.kv_cache import LayerShape, SlotCache
from streamrl.errors import EngineError

ATTENTION_NAME = "streamrl_slots"


class SlotView(Protocol):
    """One forward pass's access to keys and values: query [n, heads, tokens, dim], key [n, kv_heads, tokens, dim]."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor: ...


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,  # [n, heads, tokens, dim]
    key: Tensor,  # [n, kv_heads, tokens, dim]
    value: Tensor,  # [n, kv_heads, tokens, dim]
    attention_mask: Tensor | None,
    *,
    slot_view: SlotView | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function registered as attention implementation; returns ([n, tokens, heads, dim], None).

    Raises:
        EngineError: the layer asks for something that changes the result and that this attention does not compute.
    """
    if slot_view is None:
        raise EngineError("this model belongs to a NativeEngine, which alone can run it: build another one to call it")
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise EngineError(f"the native engine's attention has no `{name}`, which {type(module).__name__} needs")
    return slot_view.attend(module.layer_idx, query, key, value, scaling, sliding_window), None


class PromptView:
    """Right-padded prompts, each attending to itself; keys and values go to the given rows of the cache.

    Right padding lies behind every real token, so the causal rule alone hides it and no mask is needed.
    """

    def __init__(
        self, cache: SlotCache | None = None, rows: Tensor | None = None, source: Tensor | None = None
    ) -> None:
        """Row rows[i] gets the keys and values of prompt source[i]; without a cache nothing is kept."""
        self._cache, self._rows, self._source = cache, rows, source
        self._bands: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        if self._cache is not None:
            self._cache.put_prompts(layer, self._rows, self._source, key, value)
        num_tokens = query.shape[2]
        banded = window is not None and window < num_tokens
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._band(num_tokens, window, query.device) if banded else None,
            is_causal=not banded,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).contiguous()

    def _band(self, num_tokens: int, window: int, device: torch.device) -> Tensor:
        if window not in self._bands:
            ages = torch.arange(num_tokens, device=device)[:, None] - torch.arange(num_tokens, device=device)[None]
            self._bands[window] = (ages >= 0) & (ages < window)
        return self._bands[window]


class DecodeView:
    """One new token for each of rows 0..n-1, attending to its row of the cache up to and including itself."""

    def __init__(self, cache: SlotCache, positions: Tensor, span: int) -> None:
        """positions [n]: where the new tokens go, which is how many are cached; span: cached places that are read."""
        self._cache, self._positions, self._span = cache, positions, span
        self._masks: dict[int | None, Tensor] = {}
        self._indices: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        n, kv_heads = key.shape[:2]
        if kv_heads not in self._indices:
            self._indices[kv_heads] = self._cache.token_index(kv_heads, self._positions)
        self._cache.put_tokens(layer, self._indices[kv_heads], key, value)
        # The query heads that share a key head become query positions: no key is repeated in memory.
        out = scaled_dot_product_attention(
            query.reshape(n, kv_heads, -1, query.shape[-1]),
            self._cache.keys[layer][:n, :, : self._span],
            self._cache.values[layer][:n, :, : self._span],
            attn_mask=self._mask(window, query.dtype),
            scale=scaling,
        )
        return out.reshape(n, 1, query.shape[1], -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [n, 1, 1, span]; additive because a boolean one would be converted anew in every layer."""
        if window not in self._masks:
            places = torch.arange(self._span, device=self._positions.device)
            hidden = places > self._positions[:, None]
            if window is not None:
                hidden |= places <= self._positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


class ProbeView:
    """Learns what every layer stores, by one pass over one token."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return PromptView().attend(layer, query, key, value, scaling, window)
