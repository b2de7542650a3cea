"""Charts as SVG text. Pure: numbers in, text out; colors are CSS variables, so the page decides on light or dark.

Geometry: a chart is drawn on WIDTH x HEIGHT units and scales with the page. A small canvas keeps its text readable on a
phone, where it is shown at about 0.8 of its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from streamrl.metrics.text import compact

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 42
NUM_COLORS = 8
MAX_POINTS = 800
"""Longer curves, with more points than pixels, are thinned to the extremes of each stretch."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line. `faint` is raw data under a smoothed curve of the same color; it stays out of the legend."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def x_scale(low: float, high: float) -> Scale:
    """Data range to the width of the plot."""
    return Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)


def y_scale(low: float, high: float) -> Scale:
    """Data range to the height of the plot, upwards."""
    return Scale(low, high if high > low else low + 1, HEIGHT - BOTTOM, TOP)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) inside [low, high], around `about` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


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


def line_chart(title: str, curves: Sequence[Curve], *, x_label: str, y_label: str, from_zero: bool = False,
               bound: tuple[str, float] | None = None) -> str:
    """A figure with lines, axes and, for several curves, a legend.

    Args:
        from_zero: include 0 in the y-axis; for amounts, where a cut axis would exaggerate.
        bound: (label, value) of a dashed horizontal line.
    """
    curves = [_finite(curve) for curve in curves]
    curves = [curve for curve in curves if curve.xs]
    if not curves:
        return ""
    values = [y for curve in curves for y in curve.ys] + ([bound[1]] if bound else []) + ([0.0] if from_zero else [])
    low, high = _padded(min(values), max(values), from_zero)
    xs = [x for curve in curves for x in curve.xs]
    to_x, to_y = x_scale(min(xs), max(xs)), y_scale(low, high)
    body = [_axes(to_x, to_y, x_label, y_label, ticks(to_x.low, to_x.high))]
    body += [_curve(curve, to_x, to_y) for curve in curves]
    if bound:
        body.append(_bound_line(bound, to_y))  # last, so that a curve that runs along it does not hide it
    legend = [(curve.name, curve.color) for curve in curves if not curve.faint]
    return _figure(title, "".join(body), legend if len(legend) > 1 else [])


def histogram(title: str, counts: Mapping[int, float], *, x_label: str, y_label: str,
              bound: tuple[str, int] | None = None) -> str:
    """One bar per integer bin; bars beyond `bound` take the warning color. Empty without counts."""
    if not counts:
        return ""
    low, high = min([0, *counts]), max([*counts, bound[1] if bound else 0])
    total = sum(counts.values())
    to_x, to_y = x_scale(low - 0.5, high + 0.5), y_scale(0, max(counts.values()) * 1.05)
    width = (to_x(1) - to_x(0)) * 0.86
    body = [_axes(to_x, to_y, x_label, y_label, _whole_ticks(low, high))]
    for which, count in sorted(counts.items()):
        top = to_y(count)
        over = " over" if bound and which > bound[1] else ""
        body.append(
            f'<rect class="bar{over}" x="{to_x(which) - width / 2:.2f}" y="{top:.2f}" width="{width:.2f}" '
            f'height="{to_y(0) - top:.2f}" data-bin="{which}" data-count="{count}">'
            f"<title>{which}: {count} ({count / total:.1%})</title></rect>")
    if bound:
        at = to_x(bound[1] + 0.5)
        body.append(f'<line class="bound" x1="{at:.2f}" x2="{at:.2f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
                    f'<text class="note" x="{at - 4:.2f}" y="{TOP + 9}" text-anchor="end">{escape(bound[0])}</text>')
    return _figure(title, "".join(body), [])


def category_bars(title: str, amounts: Mapping[str, float], *, unit: str,
                  show: Callable[[float], str] = compact) -> str:
    """Horizontal bars with names, largest first. Empty without amounts."""
    if not amounts:
        return ""
    ordered = sorted(amounts.items(), key=lambda item: -item[1])
    row, label = 24, 128
    most = max(ordered[0][1], 1e-12)
    body = []
    for i, (name, amount) in enumerate(ordered):
        y, length = i * row, max(1.0, amount / most * (WIDTH - label - 66))
        body.append(
            f'<text class="tick" x="{label - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="bar" x="{label}" y="{y + 4}" width="{length:.2f}" height="{row - 8}" rx="2"/>'
            f'<text class="tick" x="{label + length + 6:.2f}" y="{y + 16}">{escape(show(amount))}</text>')
    return _figure(f"{title} ({unit})", "".join(body), [], height=row * len(ordered) + 4)


def _finite(curve: Curve) -> Curve:
    pairs = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(y)]
    xs, ys = thin([x for x, _ in pairs], [y for _, y in pairs])
    return Curve(curve.name, xs, ys, curve.color, curve.faint, curve.dots)


def _padded(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    room = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
    if low >= 0:  # amounts and shares are never negative: neither is their axis
        return 0.0 if from_zero else max(0.0, low - room), high + room
    return low - room, high + room


def _whole_ticks(low: int, high: int) -> list[float]:
    return sorted({float(round(t)) for t in ticks(low, high, 8) if abs(t - round(t)) < 1e-9}) or [float(low)]


def _axes(to_x: Scale, to_y: Scale, x_label: str, y_label: str, x_ticks: Sequence[float]) -> str:
    base = HEIGHT - BOTTOM
    parts = []
    for value in ticks(to_y.low, to_y.high):
        y = to_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>'
                     f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.2f}" text-anchor="end">{compact(value)}</text>')
    for value in x_ticks:
        x = to_x(value)
        parts.append(f'<line class="axis" x1="{x:.2f}" x2="{x:.2f}" y1="{base}" y2="{base + 4}"/>'
                     f'<text class="tick" x="{x:.2f}" y="{base + 17}" text-anchor="middle">{compact(value)}</text>')
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}'
        f'</text><text class="label" x="2" y="12">{escape(y_label)}</text>')
    return "".join(parts)


def _bound_line(bound: tuple[str, float], to_y: Scale) -> str:
    label, value = bound
    y = to_y(value)
    return (f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>'
            f'<text class="note" x="{WIDTH - RIGHT - 2}" y="{y - 4:.2f}" text-anchor="end">{escape(label)}</text>')


def _curve(curve: Curve, to_x: Scale, to_y: Scale) -> str:
    points = [(to_x(x), to_y(y)) for x, y in zip(curve.xs, curve.ys, strict=True)]
    path = "M" + "L".join(f"{x:.2f},{y:.2f}" for x, y in points)
    color = curve.color % NUM_COLORS
    out = f'<path class="curve c{color}{" faint" if curve.faint else ""}" d="{path}"/>'
    if curve.dots or len(points) == 1:  # a single point has no line
        out += "".join(
            f'<circle class="dot c{color}" cx="{x:.2f}" cy="{y:.2f}" r="3"><title>{escape(curve.name)} at '
            f"{compact(at)}: {compact(value)}</title></circle>"
            for (x, y), at, value in zip(points, curve.xs, curve.ys, strict=True))
    return out


def _figure(title: str, body: str, legend: Sequence[tuple[str, int]], height: int = HEIGHT) -> str:
    names = "".join(f'<span><i class="key k{color % NUM_COLORS}"></i>{escape(name)}</span>'
                    for name, color in legend)
    below = f'<div class="legend">{names}</div>' if names else ""
    return (f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title)}">{body}</svg>{below}</figure>')
