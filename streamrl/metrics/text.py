"""Numbers and tables as text, for the terminal, the report and Markdown alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def compact(value: float | None, digits: int = 3) -> str:
    """A number in few characters: 12345 is `12.3k`, 0.43128 is `0.431`, None is `-`."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= (1e4 if suffix == "k" else 0.9995 * size):  # 999 500 is 1M, not 1000k
            return f"{value / size:.{digits}g}{suffix}"
    if value == int(value):
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"


def with_error(value: float | None, error: float | None) -> str:
    """`0.71 ± 0.03`; the value alone where its standard error is 0 or not known."""
    return compact(value) + (f" ± {compact(error, 1)}" if value is not None and error else "")


def duration(seconds: float | None) -> str:
    """Seconds for people: `54µs`, `64ms`, `9.4s`, `1m23s`, `2h05m`, `3d04h`; `-` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.0f}µs"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(round(seconds))
    for size, big, small in ((86400, "d", "h"), (3600, "h", "m"), (60, "m", "s")):
        if whole >= size:
            return f"{whole // size}{big}{whole % size // (size // (24 if big == 'd' else 60)):02d}{small}"
    return f"{whole}s"


def time_left(seconds: float) -> str:
    """`13s left`; of the last minute whole seconds."""
    return f"{f'{max(1, round(seconds))}s' if seconds < 60 else duration(seconds)} left"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` bucket means of a curve as block characters; flat curves are drawn in the middle."""
    if not values:
        return ""
    per = max(1, math.ceil(len(values) / width))
    means = [sum(part) / len(part) for part in (values[i : i + per] for i in range(0, len(values), per))]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[3] * len(means)
    return "".join(_BLOCKS[round((m - low) / (high - low) * (len(_BLOCKS) - 1))] for m in means)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal; the first column is left-aligned, the rest right."""
    cells = [[str(c).replace("|", "\\|") for c in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    layout = "| " + " | ".join(f"{{:{'<' if i == 0 else '>'}{width}}}" for i, width in enumerate(widths)) + " |"
    lines = [layout.format(*row) for row in cells]
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
