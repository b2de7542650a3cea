"""Stacked shares over the steps of a run: which part of every batch had which lag."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from streamrl.report.charts.figure import Canvas, Entry, axes, draw, numbers, plot_area
from streamrl.report.charts.scale import Scale, ticks

MAX_COLUMNS = 160
"""Longer runs are summed over stretches of steps."""
NUM_SINGLE_BANDS = 6
"""With at most so many bins each has a band of its own; with more they double in width."""
NUM_SHADES = 8


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
                   name: str, note: str = "", wide: bool = False) -> str:
    """Bands from 0 to 1 that show the share of each range of bins at each step; empty without a count.

    Args:
        histograms: (step, count of each bin) in order of steps.
        name: what a bin is, in the legend: `lag` gives "lag 0", "lag 1".
    """
    columns = [(step, counts) for step, counts in summed(histograms) if sum(counts.values()) > 0]
    if not columns:
        return ""
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
    return draw(title, body, legend=legend, note=note, wide=wide, data=' data-low="0" data-high="1" data-log="0"')


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
