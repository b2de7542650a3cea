"""Families of trajectories to micro-batches: first fit decreasing, what families share counted once.

Longest first, into the first micro-batch with room, which needs at most 11/9 of the fewest possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from learner.data.shared_prompts import Family, Stem
from learner.data.trajectories import Trajectory

KEYS_PER_TOKEN = 16
"""Most keys of a micro-batch, in units of its tokens: attention gathers what sequences share again for each of them."""


@dataclass(slots=True)
class _Bin:
    room: int  # tokens
    room_for_keys: int
    families: list[Family] = field(default_factory=list)
    stems: set[Stem] = field(default_factory=set)

    def need(self, family: Family, size: int) -> int:
        """Tokens that a family of this size adds."""
        return size - (family.stem.num_tokens if family.stem in self.stems else 0)

    def add(self, family: Family, size: int, num_keys: int) -> None:
        self.room -= self.need(family, size)
        self.room_for_keys -= num_keys
        self.families.append(family)
        if family.stem is not None:
            self.stems.add(family.stem)


def first_fit(families: Sequence[Family], rows: Sequence[Trajectory], max_tokens: int) -> list[list[Family]]:
    """The families of each micro-batch of at most `max_tokens` packed tokens.

    A micro-batch of several families has at most `KEYS_PER_TOKEN * max_tokens` tokens where nothing is shared.
    """
    whole = {family: sum(rows[i].num_tokens for i in family.members) for family in families}
    sizes = {family: whole[family] - family.num_shared * (len(family.members) - 1) for family in families}
    bins: list[_Bin] = []
    for family in sorted(families, key=lambda family: (-sizes[family], family.members)):
        size, num_keys = sizes[family], whole[family]
        chosen = next(
            (one for one in bins if one.room >= one.need(family, size) and one.room_for_keys >= num_keys), None
        )
        if chosen is None:
            chosen = _Bin(max_tokens, KEYS_PER_TOKEN * max_tokens)
            bins.append(chosen)
        chosen.add(family, size, num_keys)
    return [one.families for one in bins]
