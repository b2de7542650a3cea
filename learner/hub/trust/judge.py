"""Outlier detection over recent per-actor statistics.

All actors get prompts of one stream, so honest ones differ by chance alone. The median of the others is what they agree
on; how far an actor may lie from it is their own spread (MAD) and the standard errors of the means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

NUM_LEAST_ACTORS = 3
"""With two, there is no telling which of them is wrong."""
NUM_LEAST, NUM_KEPT = 32, 128
"""Values of an actor before it is judged, and the newest that are looked at. So a mean must differ by a whole standard
deviation of single values to lie eight standard errors away: small real differences between machines never do."""
_NORMAL_MAD = 1.4826
"""Times the MAD is the standard deviation, for normal values."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """An actor that lies apart: how many standard errors, its mean and the median of the others' means."""

    actor_id: str
    errors: float
    mean: float
    others: float


def judge(values: Mapping[str, Sequence[float]], *, limit: float, floor: float) -> list[Outlier]:
    """List actors that lie more than `limit` standard errors from the others, farthest first; [] if none can be told.

    None can be told with fewer than `NUM_LEAST_ACTORS` that have `NUM_LEAST` values, nor where half of them or more
    would be outliers: then the majority that defines what is right is missing.

    Args:
        values: of each actor.
        floor: a standard error below this counts as this: differences of no importance make no outlier.
    """
    judged = {actor_id: one for actor_id, one in values.items() if len(one) >= NUM_LEAST}
    if len(judged) < NUM_LEAST_ACTORS:
        return []
    means = {actor_id: fmean(one) for actor_id, one in judged.items()}
    squares = {actor_id: variance(one) / len(one) for actor_id, one in judged.items()}
    found = []
    for actor_id, mean in means.items():
        others = [other for other in means if other != actor_id]
        center = median(means[other] for other in others)
        spread = _NORMAL_MAD * median(abs(means[other] - center) for other in others)
        error = math.sqrt(spread**2 + squares[actor_id] + median(squares[other] for other in others))
        errors = abs(mean - center) / max(error, floor)
        if errors > limit:
            found.append(Outlier(actor_id, errors, mean, center))
    return sorted(found, key=lambda one: -one.errors) if 2 * len(found) < len(judged) else []
