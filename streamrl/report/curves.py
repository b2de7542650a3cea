"""The numbers behind charts: curves, thinned to what pixels can show and smoothed; scales, round ticks, axis limits."""

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


# --- axes -------------------------------------------------------------------------------------------------------------

MIN_FOR_PERCENTILES = 50
"""With fewer values an axis shows all of them."""
OUTLIERS_STRETCH = 1.5
"""An axis is cut to the 1st to 99th percentile where the full range is this many times longer."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from data to pixels: linear, or of decimal logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            value, low, high = (math.log10(max(v, 1e-300)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return self.start + (value - low) / (high - low) * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Limits:
    """Ends of an axis, and what lies beyond them: how many values, and the farthest on each side (None: none does)."""

    low: float
    high: float
    num_outside: int = 0
    below: float | None = None
    above: float | None = None


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) inside [low, high], around `about` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Powers of ten inside [low, high], at most about `about` of them; 2 and 5 times these if there is hardly one."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    powers = list(range(first, last + 1))
    if len(powers) >= 2:
        every = math.ceil(len(powers) / about)
        return [10.0**p for p in powers if p % every == 0]
    found = [m * 10.0**p for p in range(first - 1, last + 1) for m in (1, 2, 5)]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)] or [low]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value of a sorted sequence that `share` of it does not exceed, by the nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def limits_of(curves: Sequence[Sequence[float]], *, include: Sequence[float] = (), log: bool = False,
              robust: bool = True) -> Limits:
    """Limits that hold every curve, cut to the curves' 1st to 99th percentiles if outliers would flatten the rest.

    Args:
        include: values that stay inside in any case, such as a bound or 0.
        log: for a logarithmic axis, on which only positive values have a place.
        robust: False shows every value.
    """
    def place(value: float) -> float:
        return math.log10(value) if log else value

    curves = [sorted(y for y in curve if y > 0 or not log) for curve in curves]
    values = [y for curve in curves for y in curve]
    if not values:
        return Limits(*((0.1, 1.0) if log else (0.0, 1.0)))
    low, high = min(values), max(values)
    if robust:
        long = [curve for curve in curves if len(curve) >= MIN_FOR_PERCENTILES]
        short = [y for curve in curves if len(curve) < MIN_FOR_PERCENTILES for y in curve]
        inner = [percentile(curve, share) for curve in long for share in (0.01, 0.99)] + short
        span = place(max(inner)) - place(min(inner))
        if span > 0 and place(high) - place(low) > OUTLIERS_STRETCH * span:
            low, high = min(inner), max(inner)
    low, high = min([low, *include]), max([high, *include])
    low, high = _padded_log(low, high) if log else _padded(low, high)
    below, above = [y for y in values if y < low], [y for y in values if y > high]
    return Limits(low, high, len(below) + len(above), min(below, default=None), max(above, default=None))


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
    top = high + room
    if low >= 0:  # amounts and shares are never negative: neither is their axis
        return (0.0 if low == 0 else max(0.0, low - room)), top
    return low - room, top if high != 0 else high


def _padded_log(low: float, high: float) -> tuple[float, float]:
    room = (high / low) ** 0.06 if high > low else 2.0
    return max(low / room, 1e-300), min(high * room, 1e300)  # not 0 and infinity, which have no logarithm
