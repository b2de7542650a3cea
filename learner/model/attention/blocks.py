"""Attention of a packed row in padded blocks: exact for every mask rule, on any device and in any type.

The packed tokens are gathered into the blocks of their layout, [sequences, length] with padding on the right, one call
of attention each, and gathered back. The keys of a sequence that continues another are those of that one, then its own.

Legend: N packed tokens, H query heads, K key/value heads, D head size, S sequences of a block, L block length, P most
tokens that a sequence of the block continues.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learner.data.layout import Block, PackedLayout
from streamrl.architectures.attend import attend
from streamrl.architectures.masks import MaskRule


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
