"""Families of trajectories to micro-batches: first fit decreasing, what families share counted once.

Longest first, into the first micro-batch with room. Families of one stem follow each other and go to where it is
already, so that few micro-batches hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from learner.data.shared_prompts import KEYS_PER_TOKEN, Family, Stem
from learner.data.trajectories import Trajectory


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

    A micro-batch has at most `KEYS_PER_TOKEN * max_tokens` tokens where nothing is shared.
    """
    whole = {family: sum(rows[i].num_tokens for i in family.members) for family in families}
    sizes = {family: whole[family] - family.num_shared * (len(family.members) - 1) for family in families}
    bins: list[_Bin] = []
    for family in _largest_first(families, sizes):
        size, num_keys = sizes[family], whole[family]
        fitting = (one for one in bins if one.room >= one.need(family, size) and one.room_for_keys >= num_keys)
        chosen = min(fitting, key=lambda one: family.stem not in one.stems, default=None)
        if chosen is None:
            chosen = _Bin(max_tokens, KEYS_PER_TOKEN * max_tokens)
            bins.append(chosen)
        chosen.add(family, size, num_keys)
    return [one.families for one in bins]


def _largest_first(families: Sequence[Family], sizes: Mapping[Family, int]) -> list[Family]:
    """By size, with all families of a stem at the place of its largest."""
    found: dict[Stem | Family, list[Family]] = {}
    for family in sorted(families, key=lambda family: (-sizes[family], family.members)):
        found.setdefault(family.stem or family, []).append(family)
    return [family for alike in found.values() for family in alike]
