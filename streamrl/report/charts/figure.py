"""The frame of a chart: canvas, axes, legend, and the data that the page's script reads back for hover and zoom.

A chart scales with the page. The small canvas keeps text readable on a phone, where it is shown at about 0.8 of its
size; the wide one fills a whole row of a large screen. Colors are classes: the page decides on light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from streamrl.metrics.text import compact
from streamrl.report.charts.curve import NUM_COLORS
from streamrl.report.charts.scale import Limits, Scale, log_ticks, ticks


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
WIDE = Canvas(width=900)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the legend; `value` stands behind the name, `run` lets the page's script hide its curve."""

    name: str
    css: str
    value: str = ""
    run: int = 0


def draw(title: str, body: Callable[[Canvas], str], *, legend: Sequence[Entry] = (), note: str = "", value: str = "",
         wide: bool = False, data: str = "", canvas: Canvas = SMALL) -> str:
    """A figure.

    Args:
        body: what is drawn on a canvas of either size.
        note: small print under the chart. value: the newest number, beside the title.
        wide: fills a row of a large screen; drawn a second time, for a phone.
        data: attributes for the page's script.
    """
    sizes = [("small", canvas), ("wide", WIDE)] if wide else [("", canvas)]
    drawings = "".join(
        f'<svg{f""" class="{name}" """ if name else " "}viewBox="0 0 {size.width} {size.height}" role="img" '
        f'aria-label="{escape(title)}">{body(size)}</svg>' for name, size in sizes)
    newest = f'<b class="newest">{escape(value)}</b>' if value else ""
    small_print = f'<div class="small-print">{escape(note)}</div>' if note else ""
    css = ' class="wide"' if wide else ""
    return (f"<figure{css}{data}>{newest}<figcaption>{escape(title)}</figcaption>{drawings}{legend_of(legend)}"
            f"{small_print}</figure>")


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
