"""Charts as HTML: lines with error bars, stacked shares, histograms and bars, in one frame.

A chart scales with the page. The small canvas keeps text readable on a phone, where it is shown at about 0.8 of its
size; the wide one fills a whole row of a large screen. Colors are classes: the page decides on light or dark. What the
page's script reads back for hover and zoom stands in `data-` attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from streamrl.metrics.text import compact
from streamrl.report.curves import NUM_COLORS, Curve, Limits, Scale, finite, limits_of, log_ticks, ticks

MAX_COLUMNS = 160
"""Shares of longer runs are summed over stretches of steps."""
NUM_SINGLE_BANDS = 6
"""With at most so many bins each has a band of its own; with more they double in width."""
NUM_SHADES = 8


@dataclass(frozen=True, slots=True)
class Canvas:
    """Size of a drawing and of the margins around its plot, in its own units."""

    width: int = 440
    height: int = 250
    left: int = 52
    right: int = 12
    top: int = 24
    bottom: int = 42

    @property
    def base(self) -> int:
        return self.height - self.bottom

    @property
    def plot_width(self) -> int:
        return self.width - self.left - self.right

    def x_scale(self, low: float, high: float) -> Scale:
        """Data range to the width of the plot."""
        return Scale(low, high if high > low else low + 1, self.left, self.width - self.right)

    def y_scale(self, low: float, high: float, log: bool = False) -> Scale:
        """Data range to the height of the plot, upwards."""
        return Scale(low, high if high > low else low + 1, self.base, self.top, log)


EDGE = 4
"""Room left and right of the plot; the page's script knows it, too."""
SMALL = Canvas()
WIDE = 900


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the legend; `value` stands behind the name, `run` lets the page's script hide its curve."""

    name: str
    css: str
    value: str = ""
    run: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart before it is drawn.

    Attributes:
        body: draws on a canvas of either size.
        note: small print under the chart. value: the newest number, beside the title.
        data: attributes for the page's script.
    """

    title: str
    body: Callable[[Canvas], str]
    legend: Sequence[Entry] = ()
    note: str = ""
    value: str = ""
    data: str = ""
    canvas: Canvas = SMALL

    def html(self, *, wide: bool = False) -> str:
        """The figure; `wide` fills a row of a large screen, drawn a second time for a phone."""
        sizes = [("small", self.canvas), ("wide", replace(self.canvas, width=WIDE))] if wide else [("", self.canvas)]
        title = escape(self.title)
        drawings = "".join(
            f'<svg{f""" class="{name}" """ if name else " "}viewBox="0 0 {size.width} {size.height}" role="img" '
            f'aria-label="{title}">{self.body(size)}</svg>' for name, size in sizes)
        newest = f'<b class="newest">{escape(self.value)}</b>' if self.value else ""
        small_print = f'<div class="small-print">{escape(self.note)}</div>' if self.note else ""
        css = ' class="wide"' if wide else ""
        return (f"<figure{css}{self.data}>{newest}<figcaption>{title}</figcaption>{drawings}{legend_of(self.legend)}"
                f"{small_print}</figure>")


def charts_html(charts: Iterable[Chart | None]) -> str:
    """Charts two to a row; the first fills a row if their number is odd. Empty if none has data."""
    found = [chart for chart in charts if chart is not None]
    figures = "".join(chart.html(wide=not place and len(found) % 2 == 1) for place, chart in enumerate(found))
    return f'<div class="charts">{figures}</div>' if figures else ""


def legend_of(entries: Sequence[Entry]) -> str:
    """Names with their keys; empty without entries."""
    names = "".join(
        f'<span data-run="{entry.run}"><i class="key {entry.css}"></i>{escape(entry.name)}'
        + (f" <b>{escape(entry.value)}</b>" if entry.value else "") + "</span>" for entry in entries)
    return f'<div class="legend">{names}</div>' if names else ""


def plot_area(canvas: Canvas, content: str) -> str:
    """`content` cut off at the edges of the plot, with room for a dot at either end."""
    size = f"{canvas.left - EDGE} {canvas.top} {canvas.plot_width + 2 * EDGE} {canvas.base - canvas.top}"
    x, y, width, height = size.split()
    return (f'<svg class="plot" x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{size}" '
            f'overflow="hidden">{content}</svg>')


def axes(canvas: Canvas, to_x: Scale, to_y: Scale, x_label: str, y_label: str, x_ticks: Sequence[float]) -> str:
    """Grid, tick values and labels."""
    parts = ["<g>"]
    for value in log_ticks(to_y.low, to_y.high) if to_y.log else ticks(to_y.low, to_y.high):
        y = to_y(value)
        parts.append(
            f'<line class="grid" x1="{canvas.left}" x2="{canvas.width - canvas.right}" y1="{y:.2f}" y2="{y:.2f}"/>'
            f'<text class="tick" x="{canvas.left - 6}" y="{y + 4:.2f}" text-anchor="end">{tick_text(value)}</text>')
    parts.append('</g><g class="x-ticks">')
    for value in x_ticks:
        x = to_x(value)
        parts.append(
            f'<line class="axis" x1="{x:.2f}" x2="{x:.2f}" y1="{canvas.base}" y2="{canvas.base + 4}"/>'
            f'<text class="tick" x="{x:.2f}" y="{canvas.base + 17}" text-anchor="middle">{tick_text(value)}</text>')
    parts.append(
        f'</g><line class="axis" x1="{canvas.left}" x2="{canvas.width - canvas.right}" y1="{canvas.base}" '
        f'y2="{canvas.base}"/><text class="label x-label" x="{canvas.left + canvas.plot_width / 2}" '
        f'y="{canvas.height - 6}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text class="label" x="2" y="12">{escape(y_label)}</text>')
    return "".join(parts)


def tick_text(value: float) -> str:
    """`compact`, with powers of ten below 0.001 as 1e-5."""
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else compact(value)


def bound_line(canvas: Canvas, bound: tuple[str, float], to_y: Scale) -> str:
    """A dashed horizontal line with its label."""
    label, value = bound
    y = to_y(value)
    return (f'<line class="bound" x1="{canvas.left}" x2="{canvas.width - canvas.right}" y1="{y:.2f}" y2="{y:.2f}"/>'
            f'<text class="note" x="{canvas.width - canvas.right - 2}" y="{y - 4:.2f}" '
            f'text-anchor="end">{escape(label)}</text>')


def outside_note(limits: Limits) -> str:
    """`3 points outside the axis, up to 25.9`; empty if none is."""
    if not limits.num_outside:
        return ""
    ends = [f"down to {compact(limits.below)}"] if limits.below is not None else []
    ends += [f"up to {compact(limits.above)}"] if limits.above is not None else []
    plural = "s" if limits.num_outside > 1 else ""
    return f"{limits.num_outside} point{plural} outside the axis, {' and '.join(ends)}"


def numbers(values: Sequence[float]) -> str:
    """Data for the page's script, with five digits."""
    return ",".join(f"{value:.5g}" for value in values)


def color_class(prefix: str, color: int) -> str:
    """The class of a color; those after the last begin again with thinner lines."""
    return f"{prefix}{color % NUM_COLORS}" + (" again" if color >= NUM_COLORS else "")


def line_chart(title: str, curves: Sequence[Curve], *, x_label: str, y_label: str, from_zero: bool = False,
               bound: tuple[str, float] | None = None, log: bool = False, robust: bool = False,
               fixed: tuple[float, float] | None = None, x_end: float = 0.0, note: str = "",
               legend: bool = True) -> Chart | None:
    """Lines with axes and, for several curves, a legend; None without a value.

    Args:
        from_zero: include 0 in the y-axis; for amounts, where a cut axis would exaggerate.
        bound: (label, value) of a dashed horizontal line.
        log: logarithmic y-axis; values that are not positive are not drawn.
        robust: outliers do not set the axis; a note counts those outside.
        fixed: the ends of the y-axis, to compare charts. x_end: the x-axis reaches so far at least.
        note: small print. legend: False if another legend names the curves.
    """
    curves = [curve for curve in map(finite, curves) if curve.xs]
    if log:
        curves = [curve for curve in curves if any(y > 0 for y in curve.ys)]
    if not curves:
        return None
    include = ([bound[1]] if bound else []) + ([0.0] if from_zero and not log else [])
    limits = Limits(*fixed) if fixed else limits_of(_extents(curves), include=include, log=log, robust=robust)
    low, high = min(0.0, *(curve.xs[0] for curve in curves)), max(x_end, *(curve.xs[-1] for curve in curves))

    def body(canvas: Canvas) -> str:
        to_x, to_y = canvas.x_scale(low, high), canvas.y_scale(limits.low, limits.high, log)
        drawn = "".join(_curve(curve, to_x, to_y) for curve in curves)
        parts = [axes(canvas, to_x, to_y, x_label, y_label, ticks(to_x.low, to_x.high)), plot_area(canvas, drawn)]
        if bound:
            parts.append(bound_line(canvas, bound, to_y))  # last, so that a curve along it does not hide it
        return "".join(parts)

    named = [curve for curve in curves if not curve.faint]
    several = legend and len(named) > 1
    entries = [Entry(curve.name, color_class("k", curve.color), compact(curve.ys[-1]), curve.run) for curve in named]
    return Chart(
        title, body, legend=entries if several else (), value=compact(named[-1].ys[-1]) if len(named) == 1 else "",
        note="; ".join(part for part in (note, outside_note(limits)) if part),
        data=f' data-low="{limits.low:.6g}" data-high="{limits.high:.6g}" data-log="{int(log)}"')


def _extents(curves: Sequence[Curve]) -> list[list[float]]:
    """The values of each curve; of one with error bars their ends."""
    return [
        [y + sign * e for y, e in zip(curve.ys, curve.errors, strict=True) for sign in (-1, 1)] if curve.errors
        else list(curve.ys) for curve in curves
    ]


def _curve(curve: Curve, to_x: Scale, to_y: Scale) -> str:
    keep = [i for i, y in enumerate(curve.ys) if y > 0 or not to_y.log]
    xs, ys = [curve.xs[i] for i in keep], [curve.ys[i] for i in keep]
    points = [(to_x(x), to_y(y)) for x, y in zip(xs, ys, strict=True)]
    color = color_class("c", curve.color)
    data = f'data-run="{curve.run}" data-x="{numbers(xs)}" data-y="{numbers(ys)}"'
    out = ""
    if curve.errors:
        errors = [curve.errors[i] for i in keep]
        bars = "".join(
            f"M{x:.2f},{to_y(y - e):.2f}V{to_y(y + e):.2f}"
            for (x, _), y, e in zip(points, ys, errors, strict=True))
        out += f'<path class="errors {color}" {data} data-e="{numbers(errors)}" d="{bars}"/>'
    line = "M" + "L".join(f"{x:.2f},{y:.2f}" for x, y in points)
    out += (f'<path class="curve {color}{" faint" if curve.faint else ""}" data-name="{escape(curve.name)}" {data} '
            f'd="{line}"/>')
    if curve.dots or len(points) == 1:  # a single point has no line
        out += f'<path class="dots {color}" {data} d="{"".join(f"M{x:.2f},{y:.2f}h0" for x, y in points)}"/>'
    return out


def bands_of(bins: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) bin of each band: 0, 1, 2, ... if they are few, else 0, 1, 2-3, 4-7, ... up to the largest."""
    most = max(bins)
    if most < NUM_SINGLE_BANDS:
        return [(b, b) for b in range(most + 1)]
    bands, first, width = [(0, 0)], 1, 1
    while first <= most and len(bands) < NUM_SHADES - 1:
        bands.append((first, first + width - 1))
        first, width = first + width, 2 * width
    return [*bands, (first, most)] if first <= most else bands


def stacked_shares(title: str, histograms: Sequence[tuple[int, Mapping[int, int]]], *, x_label: str, y_label: str,
                   name: str) -> Chart | None:
    """Bands from 0 to 1 that show the share of each range of bins at each step; None without a count.

    Args:
        histograms: (step, count of each bin) in order of steps.
        name: what a bin is, in the legend: `lag` gives "lag 0", "lag 1".
    """
    columns = [(step, counts) for step, counts in summed(histograms) if sum(counts.values()) > 0]
    if not columns:
        return None
    if len(columns) == 1:  # an area needs two ends
        columns = [(columns[0][0] - 1, columns[0][1]), *columns]
    steps = [step for step, _ in columns]
    bands = bands_of([b for _, counts in columns for b, n in counts.items() if n])
    edges = [_cumulative(counts, bands) for _, counts in columns]  # one list of len(bands) + 1 for each column
    shown = [i for i in range(len(bands)) if any(edge[i + 1] > edge[i] for edge in edges)]

    def body(canvas: Canvas) -> str:
        to_x, to_y = canvas.x_scale(min(0, steps[0]), steps[-1]), canvas.y_scale(0.0, 1.0)
        areas = "".join(
            _area(_label(name, bands[i]), _shade(i, bands), steps, [e[i] for e in edges], [e[i + 1] for e in edges],
                  to_x, to_y) for i in shown)
        return axes(canvas, to_x, to_y, x_label, y_label, ticks(to_x.low, to_x.high)) + plot_area(canvas, areas)

    totals = [sum(n for _, counts in columns for b, n in counts.items() if first <= b <= last)
              for first, last in bands]
    legend = [Entry(_label(name, bands[i]), f"s{_shade(i, bands)}", f"{totals[i] / sum(totals):.0%}") for i in shown]
    return Chart(title, body, legend=legend, data=' data-low="0" data-high="1" data-log="0"')


def summed(histograms: Sequence[tuple[int, Mapping[int, int]]]) -> list[tuple[int, dict[int, int]]]:
    """At most `MAX_COLUMNS` histograms: those of neighboring steps added up, at the last of their steps."""
    per = max(1, math.ceil(len(histograms) / MAX_COLUMNS))
    columns = []
    for begin in range(0, len(histograms), per):
        part = histograms[begin : begin + per]
        total: dict[int, int] = {}
        for _, counts in part:
            for which, count in counts.items():
                total[which] = total.get(which, 0) + count
        columns.append((part[-1][0], total))
    return columns


def _cumulative(counts: Mapping[int, int], bands: Sequence[tuple[int, int]]) -> list[float]:
    total = sum(counts.values())
    edges = [0.0]
    for first, last in bands:
        edges.append(edges[-1] + sum(n for b, n in counts.items() if first <= b <= last) / total)
    return edges


def _area(name: str, shade: int, xs: Sequence[int], low: Sequence[float], high: Sequence[float], to_x: Scale,
          to_y: Scale) -> str:
    top = [f"{to_x(x):.2f},{to_y(y):.2f}" for x, y in zip(xs, high, strict=True)]
    bottom = [f"{to_x(x):.2f},{to_y(y):.2f}" for x, y in zip(xs, low, strict=True)]
    return (f'<path class="area s{shade}" data-name="{name}" data-run="0" data-x="{numbers(xs)}" '
            f'data-y="{numbers(high)}" data-from="{numbers(low)}" d="M{"L".join([*top, *reversed(bottom)])}Z"/>')


def _label(name: str, band: tuple[int, int]) -> str:
    first, last = band
    return f"{name} {first}" if first == last else f"{name} {first}–{last}"


def _shade(index: int, bands: Sequence[tuple[int, int]]) -> int:
    """The shade of a band: spread from the palest to the darkest over the bands there are."""
    return round(index * (NUM_SHADES - 1) / max(1, len(bands) - 1))


def histogram(title: str, counts: Mapping[int, float], *, x_label: str, y_label: str,
              bound: tuple[str, int] | None = None) -> Chart | None:
    """One bar per integer bin; bars beyond `bound` take the warning color. None without counts."""
    if not counts:
        return None
    low, high = min([0, *counts]), max([*counts, bound[1] if bound else 0])
    total = sum(counts.values())

    def body(canvas: Canvas) -> str:
        to_x, to_y = canvas.x_scale(low - 0.5, high + 0.5), canvas.y_scale(0, max(counts.values()) * 1.05)
        width = (to_x(1) - to_x(0)) * 0.86
        parts = [axes(canvas, to_x, to_y, x_label, y_label, _whole_ticks(low, high))]
        for which, count in sorted(counts.items()):
            top = to_y(count)
            over = " over" if bound and which > bound[1] else ""
            parts.append(
                f'<rect class="bar{over}" x="{to_x(which) - width / 2:.2f}" y="{top:.2f}" width="{width:.2f}" '
                f'height="{to_y(0) - top:.2f}" data-bin="{which}" data-count="{count}">'
                f"<title>{which}: {count} ({count / total:.1%})</title></rect>")
        if bound:
            at = to_x(bound[1] + 0.5)
            parts.append(
                f'<line class="bound" x1="{at:.2f}" x2="{at:.2f}" y1="{canvas.top}" y2="{canvas.base}"/><text '
                f'class="note" x="{at - 4:.2f}" y="{canvas.top - 5}" text-anchor="end">{escape(bound[0])}</text>')
        return "".join(parts)

    return Chart(title, body)


def category_bars(title: str, amounts: Mapping[str, float], *, unit: str,
                  show: Callable[[float], str] = compact) -> Chart | None:
    """Horizontal bars with names, largest first. None without amounts."""
    if not amounts:
        return None
    ordered = sorted(amounts.items(), key=lambda item: -item[1])
    row, label = 24, 128
    most = max(ordered[0][1], 1e-12)

    def body(canvas: Canvas) -> str:
        parts = []
        for i, (name, amount) in enumerate(ordered):
            y, length = i * row, max(1.0, amount / most * (canvas.width - label - 66))
            parts.append(
                f'<text class="tick" x="{label - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
                f'<rect class="bar" x="{label}" y="{y + 4}" width="{length:.2f}" height="{row - 8}" rx="2"/>'
                f'<text class="tick" x="{label + length + 6:.2f}" y="{y + 16}">{escape(show(amount))}</text>')
        return "".join(parts)

    return Chart(f"{title} ({unit})", body, canvas=Canvas(width=SMALL.width, height=row * len(ordered) + 4))


def _whole_ticks(low: int, high: int) -> list[float]:
    return sorted({float(round(t)) for t in ticks(low, high, 8) if abs(t - round(t)) < 1e-9}) or [float(low)]
