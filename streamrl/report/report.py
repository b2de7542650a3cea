"""`report.html`: one run on a page that needs nothing but itself; see `page` for what that means."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from streamrl.metrics.files import write_atomic
from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.samples import read_samples
from streamrl.report import headline
from streamrl.report.page import axis_data, page, section, toolbar
from streamrl.report.run_charts import chart_sections
from streamrl.report.samples import samples_html


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run directory; works for finished, running and killed runs.

    Raises:
        RunNotFoundError: the run has no `metrics.jsonl`.
    """
    record, damaged = read_run(run_dir), list[str]()
    said, out = samples_html(read_samples(run_dir, damaged)), Path(run_dir) / "report.html"
    write_atomic(out, report_page(replace(record, damaged=[*record.damaged, *damaged]), said))
    return out


def report_page(record: RunRecord, said: str = "") -> str:
    """The page: result first, then the curves, then what the model said (HTML), then what one looks up."""
    sections = [
        *chart_sections(record), ("samples", "Samples", section("samples", "Samples", said)),
        ("details", "Details", section("details", "Details", headline.details(record))),
    ]
    sections = [found for found in sections if found[2]]
    anchors = [(anchor, title) for anchor, title, _ in sections]
    return page(record.name, [
        headline.title(record), headline.tiles(record), headline.messages(record), toolbar(anchors), axis_data(record),
        *(text for _, _, text in sections),
    ])
