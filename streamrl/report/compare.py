"""Several runs side by side as a table: what was changed and what came of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.text import compact, duration, markdown_table

HEADER = ("run", "steps", "wall", "eval first", "eval last", "lag mean", "lag max", "trained tok/s", "generated tok/s",
          "learner waits")


def compare_runs(run_dirs: Sequence[str | os.PathLike[str]], labels: Sequence[str] | None = None) -> str:
    """A Markdown table, a row a run, which also lines up in a terminal.

    Args:
        labels: names of the rows, such as the overrides of a multirun; None finds them in the run directories.
    """
    records = [read_run(path) for path in run_dirs]
    return markdown_table(HEADER, comparison_rows(records, labels))


def run_labels(records: Sequence[RunRecord], labels: Sequence[str] | None = None) -> list[str]:
    """What tells the runs apart: the given labels, else the overrides that not all share, else directory names."""
    if labels is not None:
        if len(labels) != len(records):
            raise ValueError(f"{len(labels)} labels for {len(records)} runs: give one each.")
        return list(labels)
    shared = set.intersection(*(set(r.overrides) for r in records)) if records else set()
    own = [", ".join(o for o in r.overrides if o not in shared) for r in records]
    return own if all(own) and len(set(own)) == len(own) else [r.name for r in records]


def comparison_rows(records: Sequence[RunRecord], labels: Sequence[str] | None = None) -> list[list[str]]:
    """Cells as text in the order of `HEADER`; `-` where a run has no summary."""
    rows = []
    for label, record in zip(run_labels(records, labels), records, strict=True):
        s = record.summary
        if s is None:
            step = str(record.rows[-1]["step"]) if record.rows else "0"
            rows.append([f"{label} (unfinished)", step, *["-"] * (len(HEADER) - 2)])
            continue
        waits = f"{s.learner_wait_s / s.wall_s:.0%}" if s.wall_s else "-"
        rows.append([label, str(s.steps), duration(s.wall_s), compact(s.eval_score_first), compact(s.eval_score_last),
                     compact(s.lag_mean), str(s.lag_max), compact(s.tokens_per_s_train),
                     compact(s.tokens_per_s_generate), waits])
    return rows
