"""Trajectories with a common beginning, which one pass over it can serve.

Hidden states at a token depend on the tokens up to it alone, so trajectories can share those of every token that comes
before their first difference:

    family    trajectories with the same prompt: the prompt, and what their responses have in common after it
    stem      of families whose prompts begin alike: a system prompt, the tools, examples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from learner.data.trajectories import Trajectory

T = TypeVar("T")

LEAST_SHARED_TOKENS = 4
"""A shorter beginning is packed for every trajectory: another block of attention may cost more than its tokens."""
LEAST_STEM_TOKENS = 8
"""As above, of families: theirs is a third level of sequences."""
LEAST_STEM_SHARE = 1 / 16
"""A stem that saves less of its families' tokens costs more than it saves: attention then has a mask."""
KEYS_PER_TOKEN = 8
"""Most keys of a micro-batch, in units of its most tokens: attention gathers what is shared again for each sequence,
and 8 keys for each token, of 8 heads of 128, add less than a fifth to what a layer keeps for its backward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class Stem:
    """Leading tokens that several families have in common."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Family:
    """Trajectories that are packed together; `num_shared` leading tokens of them are packed once, the stem's among them
    once for all families with it that are in the same micro-batch."""

    members: tuple[int, ...]
    num_shared: int = 0
    stem: Stem | None = None


def find_families(
    tokens: Mapping[int, np.ndarray], rows: Sequence[Trajectory], *, max_tokens: int
) -> list[Family]:
    """Families of trajectories with the same prompt, and their stems.

    A family has at most `max_tokens` tokens, and where nothing is shared `KEYS_PER_TOKEN` times as many.

    Args:
        tokens: place of a trajectory in `rows` -> its tokens as far as a pass needs them: the prompt, and more.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for place in tokens:
        by_prompt.setdefault(rows[place].prompt_ids.tobytes(), []).append(place)
    found: list[Family] = []
    for members in by_prompt.values():
        shared = _common(tokens, members)
        if len(members) == 1 or shared < LEAST_SHARED_TOKENS:
            found += [Family((place,)) for place in members]
        else:
            sizes = {place: rows[place].num_tokens - shared for place in members}
            found += [
                Family(part, _common(tokens, part) if len(part) > 1 else 0)
                for part in _split(sizes, shared, max_tokens)
            ]
    return _with_stems(found, tokens)


def _with_stems(families: Sequence[Family], tokens: Mapping[int, np.ndarray]) -> list[Family]:
    beginnings = {family: tokens[family.members[0]][: family.num_shared or None] for family in families}
    sizes = {
        family: sum(len(tokens[place]) for place in family.members) - family.num_shared * (len(family.members) - 1)
        for family in families
    }
    stem_of = {}
    for num_tokens, alike in common_beginnings(beginnings):
        if num_tokens * (len(alike) - 1) >= LEAST_STEM_SHARE * sum(sizes[family] for family in alike):
            stem_of |= dict.fromkeys(alike, Stem(num_tokens))
    return [replace(family, stem=stem_of.get(family)) for family in families]


@dataclass(slots=True)
class _Neighbors:
    """Neighbors in a sorted list that begin with the same `num_tokens`, and the best choice of longer beginnings."""

    num_tokens: int
    start: int
    best: list[tuple[int, int, int]] = field(default_factory=list)  # common tokens, first and last place
    num_saved: int = 0

    def closed(self, last: int) -> tuple[list[tuple[int, int, int]], int]:
        """The better of its own tokens and those of what is in it, and the tokens saved."""
        own = self.num_tokens * (last - self.start)
        return ([(self.num_tokens, self.start, last)], own) if own >= self.num_saved else (self.best, self.num_saved)


def common_beginnings(beginnings: Mapping[T, np.ndarray]) -> list[tuple[int, list[T]]]:
    """Numbers of leading tokens, of at least LEAST_STEM_TOKENS, and who has them in common; none is named twice.

    Of those who have a beginning in common, and some of them a longer one, the beginnings are taken that save more.
    In sorted order those with a common beginning are neighbors, so that one walk finds them all.
    """
    order = sorted(beginnings, key=lambda one: beginnings[one].astype(">u8").tobytes())
    common = [_common(beginnings, pair) for pair in pairwise(order)]
    found: list[tuple[int, int, int]] = []
    unfinished: list[_Neighbors] = []  # each with more tokens than the one before
    for place, num in enumerate([*common, 0]):
        closed = _Neighbors(num, place)
        while unfinished and unfinished[-1].num_tokens > num:
            last = unfinished.pop()
            best, num_saved = last.closed(place)
            around = unfinished[-1] if unfinished and unfinished[-1].num_tokens >= num else closed
            around.best += best
            around.num_saved += num_saved
            closed.start = last.start
        if num < LEAST_STEM_TOKENS:
            found += closed.best
        elif not unfinished or unfinished[-1].num_tokens < num:
            unfinished.append(closed)
    return [(num, order[first : last + 1]) for num, first, last in found]


def _common(tokens: Mapping[T, np.ndarray], members: Sequence[T]) -> int:
    """Leading tokens that all have in common."""
    first, *others = (tokens[place] for place in members)
    common = len(first)
    for row in others:
        common = min(common, len(row))
        different = (first[:common] != row[:common]).nonzero()[0]
        common = int(different[0]) if len(different) else common
    return common


def _split(sizes: Mapping[int, int], shared: int, max_tokens: int) -> list[tuple[int, ...]]:
    """The places in order, in parts that have room next to `shared` tokens, in number of tokens and of keys."""
    parts: list[tuple[int, ...]] = []
    room = room_for_keys = 0
    for place, size in sizes.items():
        if not parts or size > room or size + shared > room_for_keys:
            parts.append(())
            room, room_for_keys = max_tokens - shared, KEYS_PER_TOKEN * max_tokens
        parts[-1] += (place,)
        room -= size
        room_for_keys -= size + shared
    return parts
