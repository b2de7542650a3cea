"""`report.html`: one run on a page that needs nothing but itself; see `page` for what that means."""

from __future__ import annotations

import os
from pathlib import Path

from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.sinks import write_atomic
from streamrl.report import headline
from streamrl.report.page import axis_data, page, section, toolbar
from streamrl.report.run_charts import chart_sections


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run directory; works for finished, running and killed runs.

    Raises:
        FileNotFoundError: the run has no `metrics.jsonl`.
    """
    out = Path(run_dir) / "report.html"
    write_atomic(out, report_page(read_run(run_dir)))
    return out


def report_page(record: RunRecord, trail: str = "") -> str:
    """The page: result first, then the curves, then what one looks up."""
    charts = chart_sections(record)
    details = section("details", "Details", headline.details(record))
    anchors = [(anchor, title) for anchor, title, _ in charts] + ([("details", "Details")] if details else [])
    return page(record.name, [
        headline.title(record), headline.tiles(record), headline.messages(record), toolbar(anchors), axis_data(record),
        *(text for _, _, text in charts), details,
    ], trail=trail)
