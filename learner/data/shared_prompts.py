"""Trajectories with a common beginning, which one pass over it can serve.

Hidden states at a token depend on the tokens up to it alone, so trajectories can share those of every token that comes
before their first difference:

    family    trajectories with the same prompt: the prompt, and what their responses have in common after it
    stem      of families whose prompts begin alike: a system prompt, the tools, examples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from learner.data.trajectories import Trajectory

T = TypeVar("T")

LEAST_SHARED_TOKENS = 4
"""A shorter beginning is packed for every trajectory: another block of attention may cost more than its tokens."""
LEAST_STEM_TOKENS = 8
"""As above, of families: theirs is a third level of sequences."""


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
    """Families of trajectories with the same prompt, each of at most `max_tokens` tokens, and their stems.

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
                for part in _split(sizes, max_tokens - shared)
            ]
    beginnings = {family: tokens[family.members[0]][: family.num_shared or None] for family in found}
    stem_of = {family: stem for stem, alike in _stems(beginnings, 0).items() for family in alike}
    return [replace(family, stem=stem_of.get(family)) for family in found]


def _stems(beginnings: Mapping[Family, np.ndarray], known: int) -> dict[Stem, list[Family]]:
    """Stems of these families, whose first `known` tokens are the same, and the families of each.

    Of families that have a stem, and some of them a longer one, those stems are taken that save more tokens.
    """
    by_next: dict[bytes, list[Family]] = {}
    for family, own in beginnings.items():
        if len(own) >= known + LEAST_STEM_TOKENS:
            by_next.setdefault(own[known : known + LEAST_STEM_TOKENS].tobytes(), []).append(family)
    found: dict[Stem, list[Family]] = {}
    for alike in by_next.values():
        if len(alike) > 1:
            mine = Stem(_common(beginnings, alike))
            longer = _stems({family: beginnings[family] for family in alike}, mine.num_tokens)
            found |= longer if _num_saved(longer) > _num_saved({mine: alike}) else {mine: alike}
    return found


def _num_saved(stems: Mapping[Stem, Sequence[Family]]) -> int:
    return sum(stem.num_tokens * (len(families) - 1) for stem, families in stems.items())


def _common(tokens: Mapping[T, np.ndarray], members: Sequence[T]) -> int:
    """Leading tokens that all have in common."""
    first, *others = (tokens[place] for place in members)
    common = len(first)
    for row in others:
        common = min(common, len(row))
        different = (first[:common] != row[:common]).nonzero()[0]
        common = int(different[0]) if len(different) else common
    return common


def _split(sizes: Mapping[int, int], most: int) -> list[tuple[int, ...]]:
    """The places in order, in parts whose sizes add up to at most `most`."""
    parts: list[tuple[int, ...]] = [()]
    room = most
    for place, size in sizes.items():
        if parts[-1] and size > room:
            parts.append(())
            room = most
        parts[-1] += (place,)
        room -= size
    return parts
