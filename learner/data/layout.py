"""Packed layout: sequences laid end to end, and the padded blocks in which attention computes them.

    sequences     prompt | answer | answer | other prompt and answer          lengths, in packed order
    parents         -1       0        0               -1                      the sequence that one continues, or -1

A sequence that continues another sees all of that one and itself, and what that one continues: answers to a prompt
share the prompt's tokens, which are packed once. Blocks hold sequences of similar length, chosen so that each needs
less than twice the attention area of its members.

Legend: N packed tokens, S sequences of a block, L most tokens of one, P most tokens of a sequence that one continues.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from streamrl.weights.gpu.pinned import upload

T = TypeVar("T")

_MOST_KEPT = 64  # a model has a few mask rules in a pass, times a few blocks
_NOWHERE = 1 << 30
"""Position of padding before a sequence's own tokens: later than any query's, so causal rules hide it."""


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """The keys of a block whose sequences continue others: those of the other sequence, then its own."""

    key_sources: Tensor  # int64 [S * (P + L)] the packed token of each key; any token in the padding
    query_positions: Tensor  # int64 [S, L] from the start of the sequence that is continued
    key_positions: Tensor  # int64 [S, P + L]; padding is later than every query that is a token

    @property
    def num_keys(self) -> int:
        """P + L."""
        return self.key_positions.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Sequences of similar length, padded to one."""

    length: int  # L
    sources: Tensor  # int64 [S * L] the packed token at each place; any token in the padding
    continued: Continued | None = None  # None: each sequence sees itself alone

    def to(self, device: torch.device) -> Block:
        """The same block on `device`."""
        more = self.continued
        if more is not None:
            more = Continued(*(upload(t, device) for t in (more.key_sources, more.query_positions, more.key_positions)))
        return Block(self.length, upload(self.sources, device), more)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PackedLayout:
    """The blocks of one packed row; made once per micro-batch, used in every layer."""

    lengths: tuple[int, ...]  # tokens of each sequence, in packed order
    blocks: tuple[Block, ...]
    block_index: Tensor | None  # int64 [N] place of each packed token in all blocks; None if one block is the row
    parents: tuple[int, ...] = ()  # of each sequence the one that it continues, or -1; empty if none does
    key_places: tuple[np.ndarray, ...] = ()  # of each sequence the places of its keys; empty: those of its own tokens
    gather: Callable[[Tensor], Tensor] | None = None  # keys of a whole row from those of this part of it
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """The object that `make` returned for this key, shared by the layers of a pass; masks of earlier passes go."""
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout on `device`."""
        index = None if self.block_index is None else upload(self.block_index, device)
        blocks = tuple(block.to(device) for block in self.blocks)
        return replace(self, blocks=blocks, block_index=index, _kept={})


def make_layout(lengths: Sequence[int], parents: Sequence[int] = ()) -> PackedLayout:
    """Longest first, a block takes the next sequence while its area stays below twice the need of its members.

    Args:
        lengths: tokens of each sequence, at least 1.
        parents: of each sequence the index of the one before it that it continues, or -1.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    places = np.arange(starts[-1])
    prefixes: list[np.ndarray] = []
    for at in parents or [-1] * len(lengths):
        begun = (prefixes[at], places[starts[at] : starts[at + 1]]) if at >= 0 else (places[:0],)
        prefixes.append(np.concatenate(begun))
    blocks, index = _blocks(starts, lengths, prefixes)
    if not any(map(len, prefixes)):
        return PackedLayout(tuple(lengths), blocks, index)
    return PackedLayout(tuple(lengths), blocks, index, tuple(parents), _with_own(prefixes, starts, lengths))


def cut_layout(
    packing: PackedLayout, first: int, last: int, *, padding: int, gather: Callable[[Tensor], Tensor]
) -> PackedLayout:
    """The layout of a row's tokens from `first` to `last`, whose keys are those of the whole row.

    What a sequence has before its part here, and what it continues, are keys that it continues.

    Args:
        padding: single tokens behind the row.
        gather: makes the keys of the whole row of those of this part.
    """
    lengths = [*packing.lengths, *[1] * padding]
    ends = np.cumsum(lengths)
    places, starts, sizes, prefixes = np.arange(ends[-1]), [], [], []
    for number, (begin, end) in enumerate(zip(ends - lengths, ends, strict=True)):
        low, high = max(int(begin), first), min(int(end), last)
        if low < high:
            parent = packing.parents[number] if number < len(packing.parents) else -1
            head = packing.key_places[parent] if parent >= 0 else places[:0]
            prefixes.append(np.concatenate([head, places[begin:low]]))
            starts.append(low)
            sizes.append(high - low)
    blocks, index = _blocks(starts, sizes, prefixes, first=first, of_row=True)
    return PackedLayout(tuple(sizes), blocks, index, (), _with_own(prefixes, starts, sizes), gather)


def _with_own(
    prefixes: Sequence[np.ndarray], starts: Sequence[int], lengths: Sequence[int]
) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate([prefix, np.arange(start, start + length)])
                 for prefix, start, length in zip(prefixes, starts, lengths, strict=False))


def _blocks(
    starts: Sequence[int], lengths: Sequence[int], prefixes: Sequence[np.ndarray], *, first: int = 0,
    of_row: bool = False,
) -> tuple[tuple[Block, ...], Tensor | None]:
    """Blocks of sequences, and the place of each token in them.

    Args:
        starts: places of the sequences in the row, of which these are the tokens from `first` on.
        prefixes: places of the keys that each sequence has before its own.
        of_row: keys are those of the row, and not just of these tokens.
    """
    before = [len(prefix) for prefix in prefixes]
    alone = [] if of_row else [i for i, length in enumerate(before) if not length]
    continued = [i for i, length in enumerate(before) if of_row or length]
    total = sum(lengths)
    block_index = np.empty(total, dtype=np.int64)  # numpy: torch's threads cost more than operations of this size
    blocks: list[Block] = []
    first_place = 0
    for members in [*_group(alone, lengths, before), *_group(continued, lengths, before)]:
        begin, size = (np.array([values[i] for i in members], dtype=np.int64)[:, None] for values in (starts, lengths))
        offsets = np.arange(int(size.max()), dtype=np.int64)[None, :]
        real = offsets < size
        own = np.where(real, begin + offsets, begin)
        block_index[own[real] - first] = first_place + np.flatnonzero(real)
        more = _continued([prefixes[i] for i in members], own) if of_row or before[members[0]] else None
        blocks.append(Block(own.shape[1], torch.from_numpy((own - first).reshape(-1)), more))
        first_place += own.size
    identity = len(blocks) == 1 and first_place == total and bool((block_index == np.arange(first_place)).all())
    return tuple(blocks), None if identity and not of_row else torch.from_numpy(block_index)


def _continued(prefixes: Sequence[np.ndarray], own: np.ndarray) -> Continued:
    """Keys of a block; `own` [S, L] are the places of the members' tokens, `prefixes` those of the keys before."""
    size = np.array([len(prefix) for prefix in prefixes], dtype=np.int64)[:, None]
    offsets = np.arange(int(size.max()), dtype=np.int64)[None, :]
    real = offsets < size
    query_positions = size + np.arange(own.shape[1], dtype=np.int64)[None, :]
    earlier = np.repeat(own[:, :1], offsets.shape[1], axis=1)
    earlier[real] = np.concatenate(prefixes)
    keys = np.concatenate([earlier, own], axis=1)
    return Continued(
        key_sources=torch.from_numpy(keys.reshape(-1)),
        query_positions=torch.from_numpy(query_positions),
        key_positions=torch.from_numpy(np.concatenate([np.where(real, offsets, _NOWHERE), query_positions], axis=1)),
    )


def _group(indices: Sequence[int], lengths: Sequence[int], before: Sequence[int]) -> list[list[int]]:
    """Sequences into blocks: similar in their own length and in that of what they continue."""
    groups: list[list[int]] = []
    need = width = keys = 0
    for index in sorted(indices, key=lambda i: (-before[i], -lengths[i], i)):
        area = lengths[index] * (before[index] + lengths[index])
        wide, most = max(width, lengths[index]), max(keys, before[index])
        if groups and (len(groups[-1]) + 1) * wide * (most + wide) < 2 * (need + area):
            groups[-1].append(index)
            need, width, keys = need + area, wide, most
        else:
            groups.append([index])
            need, width, keys = area, lengths[index], before[index]
    return groups
