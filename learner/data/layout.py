"""Packed layout: a row of sequences laid end to end, and the right-padded blocks in which attention computes them.

Blocks hold sequences of similar length, chosen so that each needs less than twice the attention area of its members.

Legend: N packed tokens, L block length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Sequences of similar length, padded to one."""

    length: int  # L
    sources: Tensor  # int64 [sequences * L] the packed token at each place; any token in the padding


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """How one packed row divides into blocks; made once per micro-batch, used in every layer."""

    lengths: tuple[int, ...]  # tokens of each sequence, in packed order
    blocks: tuple[Block, ...]
    block_index: Tensor | None  # int64 [N] place of each packed token in all blocks; None if one block is the row

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout on `device`."""
        blocks = tuple(Block(block.length, block.sources.to(device)) for block in self.blocks)
        return PackedLayout(self.lengths, blocks, None if self.block_index is None else self.block_index.to(device))


def make_layout(lengths: Sequence[int]) -> PackedLayout:
    """Longest first, a block takes the next sequence while its area stays below twice the need of its members."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    block_index = torch.empty(starts[-1], dtype=torch.int64)
    blocks: list[Block] = []
    first_place = 0
    for members in _group_by_length(lengths):
        width = lengths[members[0]]
        begin = torch.tensor([starts[i] for i in members])[:, None]
        size = torch.tensor([lengths[i] for i in members])[:, None]
        offsets = torch.arange(width)[None, :]
        real = offsets < size
        sources = torch.where(real, begin + offsets, begin).flatten()
        block_index[sources[real.flatten()]] = first_place + real.flatten().nonzero().squeeze(1)
        blocks.append(Block(width, sources))
        first_place += sources.numel()
    identity = len(blocks) == 1 and torch.equal(blocks[0].sources, torch.arange(starts[-1]))
    return PackedLayout(tuple(lengths), tuple(blocks), None if identity else block_index)


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
