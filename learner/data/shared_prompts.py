"""Trajectories with a common beginning, which one pass over it can serve: the members of a group and their prompt.

Hidden states at a token depend on the tokens up to it alone, so the trajectories of a family can share those of every
token that comes before their first difference: the prompt, and what their responses have in common after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from learner.data.trajectories import Trajectory

LEAST_SHARED_TOKENS = 4
"""A shorter beginning is packed for every trajectory: another block of attention may cost more than its tokens."""


@dataclass(frozen=True, slots=True)
class Family:
    """Trajectories that are packed together; `num_shared` leading tokens of them are packed once."""

    members: tuple[int, ...]
    num_shared: int = 0


def find_families(
    tokens: Mapping[int, np.ndarray], rows: Sequence[Trajectory], *, max_tokens: int
) -> list[Family]:
    """Families of trajectories with the same prompt, each of at most `max_tokens` tokens.

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
    return found


def _common(tokens: Mapping[int, np.ndarray], members: Sequence[int]) -> int:
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
