"""Bar charts: counts of integer bins, and named amounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from streamrl.metrics.text import compact
from streamrl.report.charts.figure import SMALL, Canvas, axes, draw
from streamrl.report.charts.scale import ticks


def histogram(title: str, counts: Mapping[int, float], *, x_label: str, y_label: str,
              bound: tuple[str, int] | None = None) -> str:
    """One bar per integer bin; bars beyond `bound` take the warning color. Empty without counts."""
    if not counts:
        return ""
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

    return draw(title, body)


def category_bars(title: str, amounts: Mapping[str, float], *, unit: str,
                  show: Callable[[float], str] = compact) -> str:
    """Horizontal bars with names, largest first. Empty without amounts."""
    if not amounts:
        return ""
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

    return draw(f"{title} ({unit})", body, canvas=Canvas(width=SMALL.width, height=row * len(ordered) + 4))


def _whole_ticks(low: int, high: int) -> list[float]:
    return sorted({float(round(t)) for t in ticks(low, high, 8) if abs(t - round(t)) < 1e-9}) or [float(low)]
