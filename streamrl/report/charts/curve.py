"""Curves: what a line chart draws, thinned to what pixels can show, and smoothed where steps are noisy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

NUM_COLORS = 8
MAX_POINTS = 800
"""Longer curves, with more points than pixels, are thinned to the extremes of each stretch."""
SMOOTH_SHARE = 20
"""A noisy curve is averaged over 1/20 of its length."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line.

    Attributes:
        color: of `NUM_COLORS`; with it goes a dash pattern, so that equal curves do not hide each other.
        faint: raw data under a smoothed curve of the same color; it stays out of the legend.
        weights: how much each point counts in a moving average; equally if empty.
        errors: half the length of the error bar of each point; none if empty.
        run: index among the runs of a comparison; 0 in a report.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    faint: bool = False
    dots: bool = False
    errors: Sequence[float] = ()
    run: int = 0
    weights: Sequence[float] = ()


def finite(curve: Curve) -> Curve:
    """Drop values that are not finite, and thin the curve."""
    keep = [i for i, y in enumerate(curve.ys) if math.isfinite(y)]
    if curve.errors:
        return replace(curve, xs=[curve.xs[i] for i in keep], ys=[curve.ys[i] for i in keep],
                       errors=[curve.errors[i] for i in keep])
    xs, ys = thin([curve.xs[i] for i in keep], [curve.ys[i] for i in keep])
    return replace(curve, xs=xs, ys=ys)


def thin(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most about `limit` points, keeping the smallest and largest of each stretch, so that no spike is lost."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    per = math.ceil(2 * len(xs) / limit)
    keep: list[int] = []
    for begin in range(0, len(xs), per):
        part = range(begin, min(begin + per, len(xs)))
        keep += sorted({min(part, key=ys.__getitem__), max(part, key=ys.__getitem__)})
    return [xs[i] for i in keep], [ys[i] for i in keep]


def smooth(ys: Sequence[float], window: int) -> list[float]:
    """Centered moving average over `window` values or one more; at the ends over those that exist."""
    half = window // 2
    sums = [0.0]
    for y in ys:
        sums.append(sums[-1] + y)
    spans = [(max(0, i - half), min(len(ys), i + half + 1)) for i in range(len(ys))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]


def noisy(curve: Curve) -> list[Curve]:
    """The raw data, faint, and then its moving average; the curve alone if it is too short for one."""
    window = len(curve.xs) // SMOOTH_SHARE
    if window < 2:
        return [curve]
    finite_ys = [y if math.isfinite(y) else 0.0 for y in curve.ys]
    if curve.weights:
        sums = smooth([y * weight for y, weight in zip(finite_ys, curve.weights, strict=True)], window)
        smoothed = [one / weight for one, weight in zip(sums, smooth(curve.weights, window), strict=True)]
    else:
        smoothed = smooth(finite_ys, window)
    return [replace(curve, faint=True), replace(curve, ys=smoothed)]
