"""Outlier detection over recent per-actor statistics.

All actors get prompts of one stream, so honest ones differ by chance alone. The median of the others is what they agree
on; how far an actor may lie from it is their own spread (MAD) and the standard errors of the means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

NUM_LEAST_ACTORS = 3
"""With two, there is no telling which of them is wrong."""
NUM_LEAST, NUM_KEPT = 32, 128
"""Values of an actor before it is judged, and the newest that are looked at. So a mean must differ by a whole standard
deviation of single values to lie eight standard errors away: small real differences between machines never do."""
_NORMAL_MAD = 1.4826
"""Times the MAD is the standard deviation, for normal values."""


class Recent:
    """The newest `NUM_KEPT` values of one actor; their mean is computed again only after a new one."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=NUM_KEPT)
        self._summary: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        self._summary = None

    @property
    def summary(self) -> tuple[float, float]:
        """The mean, and the square of its standard error; of two values or more."""
        if self._summary is None:
            values = np.array(self._values)
            self._summary = float(values.mean()), float(values.var(ddof=1)) / len(values)
        return self._summary


@dataclass(frozen=True, slots=True)
class Outlier:
    """An actor that lies apart: how many standard errors, its mean and the median of the others' means."""

    actor_id: str
    errors: float
    mean: float
    others: float


def judge(values: Mapping[str, Recent], *, limit: float, floor: float) -> list[Outlier]:
    """List actors that lie more than `limit` standard errors from the others, farthest first; [] if none can be told.

    None can be told with fewer than `NUM_LEAST_ACTORS` that have `NUM_LEAST` values, nor where half of them or more
    would be outliers: then the majority that defines what is right is missing. Costs N log N for N actors.

    Args:
        values: of each actor.
        floor: a standard error below this counts as this: differences of no importance make no outlier.
    """
    judged = {actor_id: one.summary for actor_id, one in values.items() if len(one) >= NUM_LEAST}
    if len(judged) < NUM_LEAST_ACTORS:
        return []
    means, squares = np.array(list(judged.values())).T
    centers, spreads = median_of_others(means), np.empty_like(means)
    for center in np.unique(centers):  # three values at most
        here = centers == center
        spreads[here] = _NORMAL_MAD * median_of_others(abs(means - center))[here]
    errors = np.sqrt(spreads**2 + squares + median_of_others(squares))
    distances = abs(means - centers) / np.maximum(errors, floor)
    apart = np.flatnonzero(distances > limit)
    if 2 * len(apart) >= len(judged):
        return []
    names = list(judged)
    found = [Outlier(names[i], float(distances[i]), float(means[i]), float(centers[i])) for i in apart]
    return sorted(found, key=lambda one: -one.errors)


def median_of_others(values: np.ndarray) -> np.ndarray:
    """The median without each of the values in turn, [N], of [N] values with N >= 2."""
    order = values.argsort()
    ascending, place = values[order], order.argsort()

    def without(rank: int) -> np.ndarray:
        """The value at this rank among the others, for each."""
        return ascending[np.where(rank < place, rank, rank + 1)]

    num = len(values) - 1
    return (without((num - 1) // 2) + without(num // 2)) / 2
