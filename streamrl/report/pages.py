"""Pages that are written when a run has ended, however it did."""

from __future__ import annotations

import logging
from pathlib import Path

from streamrl.errors import StreamrlError
from streamrl.report.index import find_runs, write_index
from streamrl.report.report import write_report

log = logging.getLogger(__name__)


def write_pages(run_dir: Path, root: Path | None, *, ended_well: bool) -> None:
    """The report of a run whose learner could not write it, and the index of the folder of runs, if there is one."""
    try:
        if not ended_well and (run_dir / "metrics.jsonl").exists():
            write_report(run_dir)
        if root is not None and find_runs(root):
            write_index(root)
    except (OSError, StreamrlError, ValueError) as error:  # pages are never worth the exit status of a run
        log.warning("a page could not be written: %s", error)
