"""Line charts, with error bars where a value has them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from streamrl.metrics.text import compact
from streamrl.report.charts.curve import Curve, finite
from streamrl.report.charts.figure import (
    Canvas,
    Entry,
    axes,
    bound_line,
    color_class,
    draw,
    numbers,
    outside_note,
    plot_area,
)
from streamrl.report.charts.scale import Limits, Scale, limits_of, ticks


def line_chart(title: str, curves: Sequence[Curve], *, x_label: str, y_label: str, from_zero: bool = False,
               bound: tuple[str, float] | None = None, log: bool = False, robust: bool = False,
               fixed: tuple[float, float] | None = None, x_end: float = 0.0, note: str = "",
               wide: bool = False, legend: bool = True) -> str:
    """A figure with lines, axes and, for several curves, a legend; empty without a value.

    Args:
        from_zero: include 0 in the y-axis; for amounts, where a cut axis would exaggerate.
        bound: (label, value) of a dashed horizontal line.
        log: logarithmic y-axis; values that are not positive are not drawn.
        robust: outliers do not set the axis; a note counts those outside.
        fixed: the ends of the y-axis, to compare charts. x_end: the x-axis reaches so far at least.
        note: small print. wide: see `draw`. legend: False if another legend names the curves.
    """
    curves = [curve for curve in map(finite, curves) if curve.xs]
    if log:
        curves = [curve for curve in curves if any(y > 0 for y in curve.ys)]
    if not curves:
        return ""
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
    return draw(
        title, body, legend=entries if several else (), value=compact(named[-1].ys[-1]) if len(named) == 1 else "",
        note="; ".join(part for part in (note, outside_note(limits)) if part), wide=wide,
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
