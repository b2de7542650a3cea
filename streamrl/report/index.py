"""`index.html` of a folder of runs: every run with its headline numbers, and in every report links to its neighbors."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from streamrl.errors import RunNotFoundError, in_one_line
from streamrl.metrics.files import if_it_can_be_written, in_short, text_of, write_atomic
from streamrl.metrics.run_record import FAILURE, RunRecord, read_run
from streamrl.metrics.text import compact, duration
from streamrl.report import headline
from streamrl.report.curves import thin
from streamrl.report.page import TRAIL_BEGIN, TRAIL_END, page, table
from streamrl.report.report import write_report

log = logging.getLogger(__name__)

HEADER = ("run", "began", "steps", "wall", "evaluation", "best", "lag", "tokens/s", "")
MAX_ROWS = 120
"""Lines of metrics that are read of each run, beside its evaluations."""
MAX_DEPTH = 3
SPARK_WIDTH, SPARK_HEIGHT = 128, 26


@dataclass(frozen=True, slots=True)
class Listed:
    """A run of the index: its folder, and what is known of it."""

    path: Path
    record: RunRecord

    @property
    def began(self) -> str:
        """Sorts by time; runs of older releases, which did not note it, come first, by name."""
        return str(self.record.starts[0].get("started", "")) if self.record.starts else ""


def find_runs(root: Path) -> list[Path]:
    """Folders of runs, those that failed before their first step too, at most `MAX_DEPTH` below the root."""
    found = {path.parent for name in ("metrics.jsonl", FAILURE) for depth in range(1, MAX_DEPTH + 1)
             for path in root.glob("*/" * depth + name)}
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts))


def write_index(root: str | os.PathLike[str], *, reports: bool = False) -> Path:
    """Write `index.html` into a folder of runs, and bring the links in the runs' reports up to date.

    Args:
        reports: also write the report of each run that has none, or changed since.
    Raises:
        RunNotFoundError: no run is in the folder.
    """
    root = Path(root)
    runs = [Listed(path, _record(path)) for path in find_runs(root)]
    if not runs:
        raise RunNotFoundError(f"{root} holds no run: name a run directory, or a folder of them such as runs/.")
    groups: dict[Path, list[Listed]] = {}
    for run in sorted(runs, key=lambda run: (run.began, run.path.name)):
        groups.setdefault(run.path.parent, []).append(run)
        if reports and _outdated(run.path):
            with if_it_can_be_written(f"the report of {run.path}"):
                write_report(run.path)
    for group in groups.values():
        paths = [None, *(run.path for run in group), None]
        for before, run_dir, after in zip(paths, paths[1:], paths[2:], strict=False):
            if run_dir is not None:
                set_trail(run_dir / "report.html", trail_of(root, run_dir, before, after))
    for folder in groups:
        up = f'<a href="{_href(folder, root / "index.html")}">all runs</a>'
        set_trail(folder / "comparison.html", f"<span></span><span>{up}</span><span></span>")
    out = root / "index.html"
    write_atomic(out, index_page(root, groups))
    return out


def write_pages(run_dir: Path, root: Path | None, *, ended_well: bool) -> None:
    """When a run has ended: its report, if its learner could not write it, and the index of the folder of runs."""
    try:
        if not ended_well and (run_dir / "metrics.jsonl").exists():
            write_report(run_dir)
        if root is not None and find_runs(root):
            write_index(root)
    except Exception as error:  # pages are never worth the exit status of a run
        log.warning("a page could not be written: %s", in_one_line(error))


def _record(path: Path) -> RunRecord:
    """A run that cannot be read is listed with the reason."""
    try:
        return read_run(path, max_rows=MAX_ROWS)
    except Exception as error:  # one strange directory must not hide all the others
        return RunRecord([], name=path.name, state="unreadable", damaged=[str(error)])


def index_page(root: Path, groups: Mapping[Path, Sequence[Listed]]) -> str:
    """The page: the newest run first; runs of a sweep together under its name."""
    ordered = sorted(groups.items(), key=lambda item: max(run.began for run in item[1]), reverse=True)
    ordered.sort(key=lambda item: item[0] != root)  # single runs before sweeps
    num = sum(len(group) for _, group in ordered)
    parts = [f'<h1>{escape(root.resolve().name)}</h1><p class="subtitle">{num} run{"s" if num != 1 else ""}</p>']
    for folder, group in ordered:
        if folder != root:
            comparison = folder / "comparison.html"
            more = f' · <a href="{_href(root, comparison)}">comparison</a>' if comparison.exists() else ""
            parts.append(f"<h2>{escape(folder.relative_to(root).as_posix())}{more}</h2>")
        newest_first = group if folder != root else list(reversed(group))
        parts.append(f'<div class="index">{table(HEADER, [_row(root, run) for run in newest_first])}</div>')
    return page(f"runs in {root.resolve().name}", parts)


def trail_of(root: Path, run: Path, before: Path | None, after: Path | None) -> str:
    """Links from a run's report to the run before it, to the index and to the run after it."""
    def link(to: Path | None, text: str) -> str:
        if to is None or not (to / "report.html").exists():
            return "<span></span>"
        return f'<span><a href="{_href(run, to / "report.html")}">{escape(text.format(to.name))}</a></span>'

    comparison = run.parent / "comparison.html"
    middle = f'<a href="{_href(run, root / "index.html")}">all runs</a>'
    middle += f' · <a href="{_href(run, comparison)}">comparison</a>' if comparison.exists() else ""
    return link(before, "← {}") + f"<span>{middle}</span>" + link(after, "{} →")


def set_trail(report: Path, trail: str) -> None:
    """Put the links into a page, if it is there; one of an older release, without a place for them, stays."""
    text = text_of(report)
    begin, end = text.find(TRAIL_BEGIN), text.find(TRAIL_END)
    if begin < 0 or end < begin or text[begin + len(TRAIL_BEGIN) : end] == trail:
        return
    with if_it_can_be_written(str(report)):
        stat = report.stat()
        write_atomic(report, text[: begin + len(TRAIL_BEGIN)] + trail + text[end:])
        os.utime(report, (stat.st_atime, stat.st_mtime))  # still as old as what it tells


def sparkline(values: Sequence[float]) -> str:
    """A small curve without axes; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    xs, ys = thin(list(range(len(values))), values, limit=SPARK_WIDTH)
    low, high = min(ys), max(ys)
    span = (high - low) or 1.0
    to_x, to_y = (SPARK_WIDTH - 4) / (len(values) - 1), (SPARK_HEIGHT - 6) / span
    points = "L".join(f"{2 + x * to_x:.1f},{SPARK_HEIGHT - 3 - (y - low) * to_y:.1f}"
                      for x, y in zip(xs, ys, strict=True))
    return (f'<svg viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" role="img" aria-label="{compact(values[0])} to '
            f'{compact(values[-1])}"><path class="curve c0" d="M{points}"/></svg>')


def _row(root: Path, run: Listed) -> list[str]:
    record = run.record
    state = record.state
    report = run.path / "report.html"
    name = escape(record.name)
    name = f'<a href="{_href(root, report)}">{name}</a>' if report.exists() else name
    if state != "finished":
        name += f'<span class="badge {state}">{"ended early" if state == "killed" else state}</span>'
    about = " · ".join(part for part in (headline.task(record), headline.model(record)) if part)
    damaged = f"left out, because damaged: {in_short(record.damaged)}" if record.damaged else ""
    lines = "".join(f'<div class="small-print">{escape(line)}</div>' for line in (about, record.notes[:160], damaged)
                    if line)
    scores = record.series("eval/score")[1]
    curve = scores if len(scores) > 2 else record.judged("reward/mean")[1]
    wall_s = record.last("run/wall_s", 0.0)
    lag = record.last("lag/token_mean", float("nan"))
    rate = record.last("run/trained_tokens", 0.0) / wall_s if wall_s else None
    return [
        name + lines, escape(headline.started(record)) or "-",
        str(record.step), duration(wall_s),
        f"{compact(scores[0])} → {compact(scores[-1])}" if scores else "-", compact(max(scores)) if scores else "-",
        compact(lag, 2), compact(rate), sparkline(curve),
    ]


def _href(page_folder: Path, target: Path) -> str:
    """The address of `target`, relative to a page in `page_folder`, fit for an attribute."""
    return escape(quote(os.path.relpath(target, page_folder).replace(os.sep, "/")))


def _outdated(run: Path) -> bool:
    """Whether a run has no report, or one that is older than the files it shows."""
    report = run / "report.html"
    told = [path.stat().st_mtime for name in ("metrics.jsonl", "summary.json", FAILURE, "notes.md", "samples.jsonl")
            if (path := run / name).exists()]
    return not report.exists() or report.stat().st_mtime < max(told)
