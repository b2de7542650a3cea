"""A run in five lines, and as a small picture for a notebook."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.text import compact, duration
from streamrl.report import headline
from streamrl.report.charts import line_chart
from streamrl.report.curves import Curve, noisy, thin
from streamrl.report.report import shared_limits

MAX_POINTS = 200
STYLE = (
    ".streamrl-run{font:13px sans-serif}.streamrl-run pre{background:none;margin:0}"
    ".streamrl-run figcaption{font-weight:bold}"
    ".streamrl-run figure{display:inline-block;width:400px;margin:8px 12px 0 0}"
    ".streamrl-run .newest{float:right}.streamrl-run text{font:12px sans-serif;fill:currentColor}"
    ".streamrl-run .grid,.streamrl-run .axis{stroke:#8886}.streamrl-run .curve{fill:none;stroke:#2a78d6;stroke-width:2}"
    ".streamrl-run .faint{stroke-width:1;opacity:.3}.streamrl-run .errors{stroke:#2a78d6;opacity:.6}"
    ".streamrl-run .dots{stroke:#2a78d6;stroke-width:6;stroke-linecap:round}"
)


def run_text(record: RunRecord, directory: Path) -> str:
    """Describe a run: name and state, model and task, steps, evaluation and report."""
    report = directory / "report.html"
    about = " on ".join(part for part in (headline.model(record), headline.task(record)) if part)
    rows = [
        ("run", f"{record.name}, {headline.STATES.get(record.state, record.state)}"), ("model", about or "-"),
        ("steps", _steps(record)), ("evaluation", _evaluation(record)),
        ("report", str(report)) if report.exists() else ("directory", str(directory)),
    ]
    return "\n".join(f"{label:<11} {value}" for label, value in rows)


def run_html(record: RunRecord, directory: Path) -> str:
    """The same lines, with the curves of evaluation and reward."""
    limits = shared_limits(record)
    steps, scores, errors = record.evaluations()
    every = max(1, math.ceil(len(steps) / MAX_POINTS))
    steps, scores, errors = steps[::every], scores[::every], errors[::every]
    evaluation = [Curve("score", steps, scores, dots=True, errors=errors if any(errors) else ())]
    reward = noisy(Curve("reward", *thin(*record.judged("reward/mean"), MAX_POINTS)))
    charts = [line_chart(title, curves, x_label="step", y_label=unit, fixed=limits, x_end=record.step)
              for title, unit, curves in (("Evaluation score", "score", evaluation), ("Reward", "reward", reward))]
    return (f'<div class="streamrl-run"><style>{STYLE}</style><pre>{escape(run_text(record, directory))}</pre>'
            f'{"".join(chart.html() for chart in charts if chart)}</div>')


def _steps(record: RunRecord) -> str:
    total, wall_s = record.setting("trainer.num_steps"), record.last("run/wall_s", math.nan)
    took = f" in {duration(wall_s)}" if math.isfinite(wall_s) else ""
    return f"{record.step}" + (f" of {total}" if total else "") + took


def _evaluation(record: RunRecord) -> str:
    scores = record.evaluations()[1]
    return f"{compact(scores[0])} → {compact(scores[-1])}, best {compact(max(scores))}" if scores else "none"
