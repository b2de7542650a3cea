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
from typing import NamedTuple

from streamrl.metrics.rows import Rows
from streamrl.report.charts import numbers

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


class Section(NamedTuple):
    """A part of a page: its name in the toolbar, its HTML, and its heading if that says more than the name."""

    name: str
    body: str
    heading: str = ""

    @property
    def anchor(self) -> str:
        return escape(self.name.lower())

    def html(self) -> str:
        """The heading and what is under it; empty if nothing is."""
        heading = escape(self.heading or self.name)
        return f'<section id="{self.anchor}"><h2>{heading}</h2>{self.body}</section>' if self.body else ""


def sectioned(sections: Sequence[Section], records: Sequence[Rows], *, legend: str = "") -> str:
    """Sections below a bar that stays at the top: links to each, and the choice of the x-axis, which the script shows.

    Args:
        records: the runs whose steps the charts have.
        legend: HTML in a line of its own in the bar.
    """
    shown = [one for one in sections if one.body]
    links = "".join(f'<a href="#{one.anchor}">{escape(one.name)}</a>' for one in shown)
    buttons = "".join(f'<button data-axis="{axis}">{axis}</button>' for axis in ("step", "time", "tokens"))
    bar = (f'<div class="tools"><nav>{links}</nav><div class="axis" hidden>x-axis {buttons}'
           f'<button data-reset hidden>whole run</button></div>{legend}</div>')
    return "\n".join([bar, *map(axis_data, records), *(one.html() for one in shown)])


def axis_data(record: Rows) -> str:
    """Wall time and trained tokens of each step, for the page's script."""
    rows = [row for row in record.rows if "run/wall_s" in row]
    rows = rows[:: max(1, -(-len(rows) // MAX_AXIS_POINTS))] + rows[-1:]
    steps, times = Rows(rows).series("run/wall_s")
    tokens = Rows(rows).values("run/trained_tokens") if all("run/trained_tokens" in row for row in rows) else []
    return (f'<i class="axis-data" hidden data-step="{numbers(steps)}" data-time="{numbers(times)}" '
            f'data-tokens="{numbers(tokens)}"></i>')


def definition_list(css: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values as plain text."""
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs)
    return f'<dl class="{css}">{facts}</dl>' if pairs else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls if it must; cells are HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
