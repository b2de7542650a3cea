"""Several runs side by side: a page with overlaid curves and a table of what was changed and what came of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.sinks import write_atomic
from streamrl.metrics.summary import series
from streamrl.metrics.text import compact, duration, markdown_table
from streamrl.report.plots import line_chart
from streamrl.report.report import charts, curves_of, page

HEADER = ("run", "steps", "wall", "eval first", "eval last", "lag mean", "lag max", "trained tok/s", "generated tok/s",
          "learner waits")


def write_comparison(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> str:
    """Write the page to `out` with the suffix .html, and the table beside it as .md; returns the table."""
    records = [read_run(path) for path in run_dirs]
    labels = _labels(records)
    rows = [_row(record, label) for record, label in zip(records, labels, strict=True)]
    table = markdown_table(HEADER, rows)
    write_atomic(Path(out).with_suffix(".html"),
                 page(f"{len(records)} runs compared", [_table(rows), *_overlays(records, labels)]))
    write_atomic(Path(out).with_suffix(".md"), table)
    return table


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """What tells the runs apart: the overrides that not all share, else directory names."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if records else set()
    own = [", ".join(word for word in record.overrides if word not in shared) for record in records]
    return own if all(own) and len(set(own)) == len(own) else [record.name for record in records]


def _row(record: RunRecord, label: str) -> list[str]:
    """Cells in the order of `HEADER`; `-` where a run has no summary."""
    s = record.summary
    if s is None:
        step = str(record.rows[-1]["step"]) if record.rows else "0"
        return [f"{label} (unfinished)", step, *["-"] * (len(HEADER) - 2)]
    waits = f"{s.learner_wait_s / s.wall_s:.0%}" if s.wall_s else "-"
    return [label, str(s.steps), duration(s.wall_s), compact(s.eval_score_first), compact(s.eval_score_last),
            compact(s.lag_mean), str(s.lag_max), compact(s.tokens_per_s_train), compact(s.tokens_per_s_generate), waits]


def _overlays(records: Sequence[RunRecord], labels: Sequence[str]) -> list[str]:
    def overlay(title: str, unit: str, key: str, *, smoothed: bool = False, dots: bool = False,
                zero: bool = False) -> str:
        curves = [
            curves_of(label, *series(record.rows, key), color, smoothed, dots)[-1]  # without the raw data
            for color, (record, label) in enumerate(zip(records, labels, strict=True))
        ]
        return line_chart(title, curves, x_label="step", y_label=unit, from_zero=zero)

    return [
        charts("Learning", [overlay("Evaluation score", "score", "eval/score", dots=True),
                            overlay("Reward", "reward", "reward/mean", smoothed=True)]),
        charts("Staleness", [overlay("Mean token lag", "optimizer steps", "lag/token_mean", zero=True),
                             overlay("Largest head lag", "optimizer steps", "lag/head_max", zero=True),
                             overlay("Effective sample size, token", "fraction", "ess/token")]),
        charts("Speed", [overlay("Trained", "tokens/s", "throughput/train_tokens_per_s", smoothed=True, zero=True),
                         overlay("Generated", "tokens/s", "throughput/generate_tokens_per_s", smoothed=True,
                                 zero=True)]),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in HEADER)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
