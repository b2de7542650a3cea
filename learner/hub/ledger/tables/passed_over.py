"""Groups that arrived and are not trained on, filtered or too old: a fair draw keeps a few to be read."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from streamrl.messages import GroupOrigin, KeptGroup
from streamrl.messages.seeding import draw_key


class PassedOver:
    """The `num` groups with the smallest keys of those added since the last `take`."""

    def __init__(self, num: int, seed: int) -> None:
        self._num, self._seed = num, seed
        self._kept: dict[int, tuple[KeptGroup, ...]] = {}  # by group

    def add(self, group_id: int, frames: Sequence[bytes], origins: Sequence[GroupOrigin], fate: str) -> None:
        """Add frames of a group that will not be trained on; `fate` says why."""
        if not frames or not self._num:
            return
        self._kept[group_id] = tuple(KeptGroup(bytes(f), o, fate) for f, o in zip(frames, origins, strict=True))
        drawn = heapq.nsmallest(self._num, self._kept, key=lambda one: draw_key(self._seed, one))
        self._kept = {one: self._kept[one] for one in drawn}

    def take(self) -> tuple[KeptGroup, ...]:
        """Take every frame of the drawn groups."""
        kept, self._kept = self._kept, {}
        return tuple(frame for frames in kept.values() for frame in frames)
