"""A run directory read back: `metrics.jsonl`, `summary.json`, the resolved configuration, and how it was started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamrl.errors import CheckpointError, RunNotFoundError
from streamrl.metrics.files import parse_json, read_lines, read_object, text_of
from streamrl.metrics.rows import Rows
from streamrl.metrics.sinks import parse_row
from streamrl.metrics.summary import SUPERVISED, Summary

RUNNING_S = 20.0
"""A run whose hub has written nothing for so long is taken for dead."""
TAIL_BYTES = 1 << 18
"""The end of metrics.jsonl that holds some whole lines."""
FAILURE = "failure.txt"
"""The file of a run directory in which a sweep says why the run failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Rows):
    """The record that a run left. Files that it lacks, as an older or killed run does, leave their field empty.

    Attributes:
        summary: None while it runs, or if it was killed.
        state: "finished", "stopped" (it can be resumed), "failed", "running", or "killed" (its last files say that it
            runs); of a run of a sweep also "pruned".
        config: the resolved settings as plain values.
        starts: one object for each start, resumed ones too: `command`, `started`, `commit`, `version`.
        status: the hub's last `status.json`.
        notes: the text of `notes.md`, which people write.
        failure: why it failed.
        damaged: what could not be read of the files above, as `metrics.jsonl:7 (why)`.
    """

    name: str
    summary: Summary | None = None
    config_text: str = ""
    overrides: Sequence[str] = ()
    state: str = "finished"
    config: Mapping[str, Any] = field(default_factory=dict)
    starts: Sequence[Mapping[str, Any]] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    notes: str = ""
    failure: str = ""
    damaged: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """The trainer other than RL whose run it is, by its command; empty for RL."""
        words = str(self.starts[0].get("command", "")).split() if self.starts else []
        told = self.summary.extra.get("kind") if self.summary else None
        return str(told or next((word for word in words[:2] if word in SUPERVISED), ""))

    @property
    def step(self) -> int:
        """The newest step; 0 without any."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def setting(self, name: str, default: Any = None) -> Any:
        """The value of `policy.optimizer.lr`, say; `default` if the run's release had no such setting."""
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value


def is_run(path: Path) -> bool:
    """Whether a run began its steps in this directory, or failed before."""
    return (path / "metrics.jsonl").exists() or (path / FAILURE).exists()


def read_run(run_dir: str | os.PathLike[str], *, max_rows: int | None = None) -> RunRecord:
    """Read a finished, killed or running run.

    Args:
        max_rows: read only the lines with an evaluation and about so many others, spread over the run.
    Raises:
        RunNotFoundError: there is no `metrics.jsonl`, and no failure is known.
    """
    root = Path(run_dir)
    path = root / "metrics.jsonl"
    if not is_run(root):
        raise RunNotFoundError(f"{path} does not exist: {root} is not a run directory, or its run never began a step.")
    damaged: list[str] = []
    status, summary = read_object(root / "status.json"), None
    if (root / "summary.json").exists():
        try:
            summary = Summary.load(root / "summary.json")
        except CheckpointError as error:
            damaged.append(str(error))
    return RunRecord(
        read_metrics(path, damaged) if max_rows is None else read_some_metrics(path, max_rows, damaged),
        name=root.resolve().name,
        summary=summary,
        config_text=text_of(root / "config.yaml"),
        overrides=overrides_of(root),
        state=run_state(root, status),
        config=read_object(root / "config.json"),
        starts=starts_of(root),
        status=status,
        notes=text_of(root / "notes.md").strip(),
        failure=text_of(root / FAILURE).strip() or str(summary.failed if summary else ""),
        damaged=damaged,
    )


def run_state(root: Path, status: Mapping[str, Any]) -> str:
    """See `RunRecord.state`."""
    if (root / FAILURE).exists():
        return "failed"
    ended = read_object(root / "summary.json")
    if ended and _is_of_newest_part(root, ended, goes_on=status.get("state") in ("starting", "running")):
        stopped = str(ended.get("stopped", ""))
        if ended.get("failed"):
            return "failed"
        if stopped.startswith("pruned"):
            return "pruned"
        return "stopped" if stopped or status.get("state") == "stopped" else "finished"
    if status.get("state") in ("starting", "running"):
        age_s = datetime.now(UTC).timestamp() - (root / "status.json").stat().st_mtime
        return "running" if age_s < RUNNING_S else "killed"
    return "killed"


def _is_of_newest_part(root: Path, summary: Mapping[str, Any], *, goes_on: bool) -> bool:
    """Whether no part of the run followed, by a resume, the one whose summary this is.

    By the epochs of both, as a copy of the folder may have the times of files in any order; else by those times.
    """
    metrics, of_summary = root / "metrics.jsonl", summary.get("learner_epoch")
    if not metrics.exists():
        return True
    epochs: list[bytes] = []
    with suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        epochs = re.findall(rb'"run/epoch": (\d{1,9})', file.read())
    if epochs and isinstance(of_summary, int) and (int(epochs[-1]) > of_summary or not goes_on):
        return int(epochs[-1]) <= of_summary
    return (root / "summary.json").stat().st_mtime >= metrics.stat().st_mtime


def read_metrics(path: str | os.PathLike[str], damaged: list[str] | None = None) -> list[dict[str, Any]]:
    """The good lines of a `metrics.jsonl`; the others are named in the log, and added to `damaged`."""
    return [row for _, row in read_lines(Path(path), parse_row, damaged)]


def read_some_metrics(path: Path, max_rows: int, damaged: list[str]) -> list[dict[str, Any]]:
    """The first and last line, those with an evaluation, and about `max_rows` others; else as `read_metrics`."""
    found: dict[tuple[int, float | None], dict[str, Any]] = {}
    size = path.stat().st_size if path.is_file() else 0
    offset, next_due, newest = 0, 0.0, b""

    def keep(line: bytes) -> None:
        row = parse_row(line)
        found[row["step"], row.get("eval/version", 0.0) if "eval/score" in row else None] = row

    def look(line: bytes) -> None:
        nonlocal offset, next_due, newest
        at, offset, newest = offset, offset + len(line), line
        if at >= next_due or b'"eval/score"' in line:
            next_due = max(next_due, at + size / max_rows)
            keep(line)

    for _ in read_lines(path, look, damaged):
        pass
    with suppress(ValueError):
        keep(newest)
    return sorted(found.values(), key=lambda row: row["step"])


def starts_of(root: Path) -> list[dict[str, Any]]:
    """The entries of `run.json`, one for each start, the newest last; they hold texts."""
    starts = read_object(root / "run.json").get("starts", ())
    found = [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []
    return [{key: value for key, value in one.items() if isinstance(value, str)} for one in found]


def overrides_of(root: Path) -> list[str]:
    """Command-line overrides of the run: a YAML list of texts in JSON's quotes, which needs no YAML reader."""
    lines = text_of(root / "overrides.yaml").split("\n")
    return [_unquoted(line[2:].strip()) for line in lines if line.startswith("- ")]


def _unquoted(text: str) -> str:
    """The text in quotes, also in those of older releases, which wrote inner ones as they are."""
    with suppress(ValueError, RecursionError):
        if text.startswith('"'):
            return str(parse_json(text))
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text
