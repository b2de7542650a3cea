"""Attention of a packed row by FlexAttention: one call a layer, with a block mask that skips what no token sees.

Legend: N packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from learner.data.layout import PackedLayout
from learner.model.attention.blocks import attend_in_blocks
from streamrl.architectures.masks import MaskRule


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
    chain = [torch.tensor(numbers).repeat_interleave(sizes).to(device)]
    while max(numbers := [parents[number] if number >= 0 else -1 for number in numbers]) >= 0:
        chain.append(torch.tensor(numbers).repeat_interleave(sizes).to(device))
    position = (torch.arange(sum(lengths)) + (before - starts).repeat_interleave(sizes)).to(device)

    def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = chain[0][query] == chain[0][key]
        for continued in chain[1:]:
            near = near | (continued[query] == chain[0][key])
        return near & rule.visible(position[query], position[key])

    size = len(position)
    return create_block_mask(seen, None, None, size, size, device=str(device), _compile=compiled)
