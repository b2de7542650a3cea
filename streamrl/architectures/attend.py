"""Attention of queries to keys under a mask, with what some architectures add to the scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# torch 2.11 and later prefers cuDNN on Hopper and Blackwell, which builds a plan for every new shape, in every thread,
# and keeps it: up to half a second for each micro-batch and every few decoded tokens. flash needs no plan.
torch.backends.cuda.enable_cudnn_sdp(False)

_APPLIED = {"softcap": "softcap", "s_aux": "sinks"}
_NOT_APPLIED = ("position_bias", "alibi", "head_mask", "score_mod", "indices", "topk_indices", "indexer_topk_indices")


def check_extras(module: torch.nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a layer's changes of its scores to keywords of `attend`; ValueError for one that is not known here."""
    for name in _NOT_APPLIED:
        if keywords.get(name) is not None:
            raise ValueError(f"{type(module).__name__} changes its attention scores by `{name}`")
    return {ours: keywords[name] for name, ours in _APPLIED.items() if keywords.get(name) is not None}


def attend(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, K, T, D], K divides H
    value: Tensor,  # [B, K, T, E]
    *,
    mask: Tensor | None,  # bool or additive, broadcasts to [B, H, Q, T]; None: causal, Q = T
    scaling: float | None = None,
    softcap: float | None = None,  # scores are capped at this, smoothly, before the mask
    sinks: Tensor | None = None,  # [H], or [H * Q]: score of one more key, whose value is 0
) -> Tensor:
    """[B, H, Q, E]. Scores are scaled by `scaling`, or by 1 / sqrt(D)."""
    shared = query.shape[1] // key.shape[1]
    plain = softcap is None and sinks is None
    gqa = shared > 1 and query.is_cuda and plain
    if shared > 1 and not gqa:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    if plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    column = sinks.reshape(1, query.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column.to(scores.dtype)], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(value.dtype) @ value
