"""Records of several files as one sequence, in the shares that their weights say."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from envs.data.shapes import RecordShape
from envs.data.sources import Source
from streamrl.errors import TaskError


@dataclass(frozen=True, slots=True)
class Records:
    """Some of the records of a source."""

    source: Source
    shape: RecordShape
    indices: np.ndarray  # [N] int64, into the source

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A copy of the record. Raises TaskError naming file, record and field if it cannot be played."""
        at = int(self.indices[index])
        record = self.source.row(at)
        try:
            self.shape.check(record)
        except TaskError as error:
            raise TaskError(f"{self.source.where(at)}: {error}.") from error
        return record


@dataclass(frozen=True, slots=True)
class Mixture:
    """Parts one after the other; a part whose weight asks for more than it has is repeated within a pass.

    Args:
        lengths: places of each part in one pass, at least its number of records.
    """

    parts: tuple[Records, ...]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A copy of the record at this place: a pure function of the place. Raises as `Records`."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        ends = list(accumulate(self.lengths))
        number = bisect_right(ends, index)
        part = self.parts[number]
        return part[(index - ends[number] + self.lengths[number]) % len(part)]


def mixed(parts: Sequence[Records], weights: Sequence[float] | None) -> Mixture:
    """All parts, each with a share of the places that is proportional to its positive weight; None: all records once.

    A pass is as short as it can be while every record comes at least once.
    """
    if weights is not None:  # a part may be empty: all of it is held out
        weights = [weight for part, weight in zip(parts, weights, strict=True) if len(part)]
    parts = [part for part in parts if len(part)]
    if weights is None:
        return Mixture(tuple(parts), tuple(len(part) for part in parts))
    scale = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
    lengths = tuple(max(len(part), round(weight * scale)) for part, weight in zip(parts, weights, strict=True))
    return Mixture(tuple(parts), lengths)
