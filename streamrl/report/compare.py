"""Several runs side by side: a page with overlaid curves, a table of what came of each, and which settings differ."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from streamrl.metrics.diagnosis import learner_idle
from streamrl.metrics.files import write_atomic
from streamrl.metrics.ranking import Objective, Outcome, outcome
from streamrl.metrics.rows import SET_SCORE
from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.sinks import flat
from streamrl.metrics.text import compact, duration, markdown_table, with_error
from streamrl.report import headline
from streamrl.report.charts import charts_html, color_class, line_chart
from streamrl.report.page import Section, page, sectioned, table
from streamrl.report.report import Lines, evaluation_curves

HEADER = ("run", "eval first", "eval last", "steps", "lag mean", "lag max", "wall", "trained tok/s", "generated tok/s",
          "learner waits")
TERMINAL_WIDTH = 80
MAX_DIFFERENCES = 40
CHARTS = {
    "Learning": (
        Lines("Reward", "reward", {"reward/mean": ""}),
        Lines("Response length", "tokens", {"rollout/response_tokens/train": ""}, from_zero=True),
    ),
    "Staleness": (
        Lines("Mean token lag", "optimizer steps", {"lag/token_mean": ""}, from_zero=True),
        Lines("Largest head lag", "optimizer steps", {"lag/head_max": ""}, smoothed=False, from_zero=True),
        Lines("Effective sample size, token", "fraction", {"ess/token": ""}),
        Lines("Drift from the behavior policy", "nats, log scale", {"drift/k3": ""}, log=True),
    ),
    "Speed": (
        Lines("Trained", "tokens/s", {"throughput/train_tokens_per_s": ""}, from_zero=True),
        Lines("Generated", "tokens/s", {"throughput/generate_tokens_per_s": ""}, from_zero=True),
    ),
    "Optimization": (
        Lines("Gradient norm", "norm", {"policy/grad_norm": ""}, from_zero=True),
        Lines("Entropy", "nats", {"entropy/mean": ""}, from_zero=True),
    ),
}
"""The charts of each section, one curve a run."""
ALWAYS_DIFFER = ("run.dir", "run.name", "run.root", "versions", "hub.bind")
"""Settings that differ between any two runs, and so are not compared."""


def write_comparison(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str],
                     objective: Objective | None = None) -> str:
    """Write the page to `out` with the suffix .html, and the table beside it as .md; returns it as a terminal has room.

    With an objective the runs are ranked by it, and the table has a column for it if it lacks one. Each set of
    `eval.datasets` has a column, too.
    """
    records = [read_run(path) for path in run_dirs]
    order = range(len(records)) if objective is None else objective.order(records)
    records = [records[i] for i in order]
    labels = _labels(records)
    sets = list(dict.fromkeys(key for record in records for key in record.keys() if SET_SCORE.fullmatch(key)))
    at = HEADER.index("eval last") + 1
    rows = [list(HEADER), *(_row(record, label) for record, label in zip(records, labels, strict=True))]
    for row, record in zip(rows, [None, *records], strict=True):
        row[at:at] = [key.removesuffix("/score").replace("/", " ") if record is None else _last(record, key)
                      for key in sets]
    if objective is not None and objective.metric not in ("eval_score_first", "eval_score_last", *sets):
        values = [compact(objective.value(record)) for record in records]
        rows = [[row[0], value, *row[1:]] for row, value in zip(rows, [objective.metric, *values], strict=True)]
    text = markdown_table(rows[0], rows[1:])
    here = Path(out).resolve().parent
    links = [_link(Path(run_dirs[i]), here) for i in order]
    write_atomic(Path(out).with_suffix(".html"), comparison_page(records, labels, rows, links, str(objective or "")))
    write_atomic(Path(out).with_suffix(".md"), text)
    return terminal_table(rows, ("eval last", objective.metric if objective is not None else ""))


def terminal_table(rows: Sequence[Sequence[str]], kept: Sequence[str]) -> str:
    """The table in TERMINAL_WIDTH characters: labels are shortened, then columns left out, but the first and `kept`.

    First go those that are equal in all of several runs, then the last ones.
    """
    (head, *body), width = rows, TERMINAL_WIDTH
    labels = _distinct([_short(row[0]) for row in body], [row[0] for row in body])
    columns = [[head[0], *labels]] + [
        list(column) for column in list(zip(*rows, strict=True))[1:]
        if column[0] in kept or len(body) < 2 or len(set(column[1:])) > 1
    ]

    def table_of_columns() -> str:
        first, *others = zip(*columns, strict=True)
        return markdown_table(first, others)

    def excess() -> int:
        return table_of_columns().index("\n") - width

    while excess() > 0 and (optional := [i for i in range(1, len(columns)) if columns[i][0] not in kept]):
        del columns[optional[-1]]
    if (over := excess()) > 0:
        room = max(10, max(map(len, labels)) - over)
        cut = [one if len(one) <= room else f"{one[: room // 2 - 3]}...{one[room // 2 - room :]}" for one in labels]
        columns[0] = [head[0], *_distinct(cut, labels)]
    return table_of_columns()


def _short(label: str) -> str:
    """Shorten a label: no sections of keys, three digits of long fractions."""
    label = re.sub(r"\b(?:\w+\.)+(\w+=)", r"\1", label)
    return re.sub(r"\d+\.\d{4,}(?:e[-+]?\d+)?", lambda number: f"{float(number[0]):.3g}", label)


def _distinct(shorter: list[str], labels: list[str]) -> list[str]:
    return shorter if len(set(shorter)) == len(set(labels)) else labels


def comparison_page(records: Sequence[RunRecord], labels: Sequence[str], rows: Sequence[Sequence[str]],
                    links: Sequence[str], ranked_by: str = "") -> str:
    """The page; the first row is the head of the table, `links` are addresses of the runs' reports, "" for a run
    without one."""
    about = " · ".join(dict.fromkeys(
        part for record in records for part in (headline.task(record), headline.model(record)) if part))
    about += f"{' · ' if about else ''}ranked by {ranked_by}" if ranked_by else ""
    curves = [curve for run, (record, label) in enumerate(zip(records, labels, strict=True))
              for curve in evaluation_curves(record, label, run)]
    evaluations = line_chart("Evaluation score", curves, x_label="step", y_label="score", legend=False)
    drawn = {name: [lines.over(records, labels) for lines in charts] for name, charts in CHARTS.items()}
    drawn["Learning"].insert(0, evaluations)
    sections = [Section(name, charts_html(charts)) for name, charts in drawn.items()]
    sections.append(Section("Settings", differing_settings(records, labels), "Settings that differ"))
    notes = "".join(f'<h3>{escape(label)}</h3><div class="message"><pre>{escape(record.notes)}</pre></div>'
                    for label, record in zip(labels, records, strict=True) if record.notes)
    return page(f"{len(records)} runs compared", [
        f'<h1>{len(records)} runs compared</h1><p class="subtitle">{escape(about)}</p>', _results(rows, links),
        sectioned(sections, records, legend=_legend(labels)), Section("Notes", notes).html(),
    ])


def differing_settings(records: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """A table of the settings that are not equal in all runs; empty if none differs."""
    of_runs = [dict(flat(record.config)) for record in records]
    names = dict.fromkeys(name for settings in of_runs for name in settings)
    rows = []
    for name in names:
        values = [str(settings.get(name, "-")) for settings in of_runs]
        if len(set(values)) > 1 and not name.startswith(ALWAYS_DIFFER):
            rows.append([f"<code>{escape(name)}</code>", *map(escape, values)])
    more = (f'<p class="small-print">and {len(rows) - MAX_DIFFERENCES} more</p>' if len(rows) > MAX_DIFFERENCES else "")
    return table(("setting", *labels), rows[:MAX_DIFFERENCES]) + more if rows else ""


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """The labels of the runs: the overrides that not all share, else directory names."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if records else set()
    own = [", ".join(word for word in record.overrides if word not in shared) for record in records]
    return own if all(own) and len(set(own)) == len(own) else [record.name for record in records]


def _last(record: RunRecord, key: str, known: float | None = None) -> str:
    """The newest score, if it is not known by now, with its standard error."""
    values, errors = record.series(key)[1], record.series(f"{key}_stderr")[1]
    score = next((value for value in (known, *values[-1:]) if value is not None), None)
    if record.summary is not None and score is not None and values[-1:] != [score]:  # its last line is torn
        return with_error(score, record.summary.eval_stderr_last)
    return with_error(score, errors[-1] if errors else None)


def _row(record: RunRecord, label: str) -> list[str]:
    """Cells in the order of `HEADER`; `-` for what only a summary knows."""
    s = record.summary
    if outcome(record) != Outcome.finished:
        label = f"{label} ({s.stopped if s and s.stopped else outcome(record).name})"
    first, newest = record.series("eval/score")[1][:1], _last(record, "eval/score", s.eval_score_last if s else None)
    if s is None:
        found = [label, compact(first[0] if first else None), newest, str(record.step)]
        return [*found, *["-"] * (len(HEADER) - len(found))]
    idle = learner_idle(record.rows)
    return [label, compact(s.eval_score_first), newest, str(s.steps),
            compact(s.lag_mean), str(s.lag_max), duration(s.wall_s), compact(s.tokens_per_s_train),
            compact(s.tokens_per_s_generate), "-" if idle is None else f"{idle:.0%}"]


def _results(rows: Sequence[Sequence[str]], links: Sequence[str]) -> str:
    """The table on the page: names link to reports, the best last evaluation is marked if not all are equal."""
    header, *rows = rows
    at = header.index("eval last")
    scores = [_number(row[at]) for row in rows]
    known = {score for score in scores if score is not None}
    best = max(known) if len(known) > 1 else None
    cells = []
    for i, (row, link) in enumerate(zip(rows, links, strict=True)):
        name = f'<i class="key {color_class("k", i)}"></i>{escape(row[0])}'
        texts = [f'<a href="{escape(link)}">{name}</a>' if link else name, *map(escape, row[1:])]
        if best is not None and scores[i] == best:
            texts[at] = f'<span class="best">{texts[at]}</span>'
        cells.append(texts)
    return table(header, cells)


def _number(text: str) -> float | None:
    """The number at the beginning of a cell, before its error."""
    try:
        return float(text.partition(" ")[0])
    except ValueError:
        return None


def _link(run_dir: Path, here: Path) -> str:
    report = run_dir.resolve() / "report.html"
    return quote(os.path.relpath(report, here).replace(os.sep, "/")) if report.exists() else ""


def _legend(labels: Sequence[str]) -> str:
    """The one legend of the page; the script lets each run be hidden."""
    return '<div class="runs">' + "".join(
        f'<label><input type="checkbox" checked hidden data-run="{i}"> <i class="key {color_class("k", i)}"></i>'
        f"{escape(label)}</label>" for i, label in enumerate(labels)) + "</div>"
