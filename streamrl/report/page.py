"""A whole HTML document that needs nothing but itself: style and script are inside, and no other script may run.

Names, samples and notes come from people and models. Every text is escaped where it is put in, and the page's content
security policy allows its own script by digest, no network and no picture from elsewhere, should that ever be missed.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files

from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.summary import series
from streamrl.report.charts.figure import numbers

MAX_AXIS_POINTS = 1000
"""Times and tokens of longer runs are interpolated between so many steps."""
TRAIL_BEGIN, TRAIL_END = "<!--trail-->", "<!--/trail-->"
"""Around the links to other runs, which the index rewrites when a run is added."""


@cache
def asset(name: str) -> str:
    return (files("streamrl.report") / "web" / name).read_text(encoding="utf-8")


def page(title: str, sections: Sequence[str]) -> str:
    """The document around the sections."""
    script = asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{asset('page.css')}</style></head>\n"
        f'<body><div class="trail">{TRAIL_BEGIN}{TRAIL_END}</div>\n'
        + "\n".join(s for s in sections if s) + f"\n<script>{script}</script></body></html>\n")


def toolbar(anchors: Sequence[tuple[str, str]], extra: str = "") -> str:
    """The bar that stays at the top: links into the page, and the choice of the x-axis, which the script shows.

    Args:
        anchors: (id, name) of each section.
        extra: HTML in a line of its own.
    """
    links = "".join(f'<a href="#{escape(anchor)}">{escape(name)}</a>' for anchor, name in anchors)
    buttons = "".join(f'<button data-axis="{axis}">{axis}</button>' for axis in ("step", "time", "tokens"))
    return (f'<div class="tools"><nav>{links}</nav><div class="axis" hidden>x-axis {buttons}'
            f'<button data-reset hidden>whole run</button></div>{extra}</div>')


def axis_data(record: RunRecord) -> str:
    """Wall time and trained tokens of each step, for the page's script."""
    rows = [row for row in record.rows if "run/wall_s" in row]
    rows = rows[:: max(1, -(-len(rows) // MAX_AXIS_POINTS))] + rows[-1:]
    steps, times = series(rows, "run/wall_s")
    tokens = series(rows, "run/trained_tokens")[1] if all("run/trained_tokens" in row for row in rows) else []
    return (f'<i class="axis-data" hidden data-step="{numbers(steps)}" data-time="{numbers(times)}" '
            f'data-tokens="{numbers(tokens)}"></i>')


def section(anchor: str, title: str, body: str) -> str:
    """A heading and what is under it; empty if nothing is."""
    return f'<section id="{escape(anchor)}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def definition_list(css: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values as plain text."""
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs)
    return f'<dl class="{css}">{facts}</dl>' if pairs else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls if it must; cells are HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
