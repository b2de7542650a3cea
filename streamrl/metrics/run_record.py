"""A run directory read back: `metrics.jsonl`, `summary.json`, the resolved configuration, and how it was started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamrl.errors import CheckpointError
from streamrl.metrics.summary import Summary

RUNNING_S = 20.0
"""A run whose hub has written nothing for so long is taken for dead."""
FAILURE = "failure.txt"
"""The file of a run directory in which a sweep says why the run failed."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run left behind. Files that it lacks, as an older or killed run does, leave their field empty.

    Attributes:
        summary: None while it runs, or if it was killed.
        state: "finished", "stopped" (it can be resumed), "failed", "running", or "killed" (its last files say that it
            runs); of a run of a sweep also "pruned".
        config: the resolved settings as plain values.
        starts: one object for each start, resumed ones too: `command`, `started`, `commit`, `version`.
        status: the hub's last `status.json`.
        notes: the text of `notes.md`, which people write.
        failure: why it failed.
    """

    name: str
    rows: list[dict[str, Any]]
    summary: Summary | None
    config_text: str
    overrides: list[str]
    state: str = "finished"
    config: Mapping[str, Any] = field(default_factory=dict)
    starts: Sequence[Mapping[str, Any]] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    notes: str = ""
    failure: str = ""
    _columns: dict[str, tuple[list[int], list[Any]]] = field(default_factory=dict, repr=False, compare=False)

    def keys(self) -> list[str]:
        """Every key that some line holds, in order of appearance."""
        return list(self._by_key())

    def series(self, key: str) -> tuple[list[int], list[Any]]:
        """Steps and values of the lines that hold `key`; the lists are the record's own."""
        return self._by_key().get(key, ([], []))

    def _by_key(self) -> dict[str, tuple[list[int], list[Any]]]:
        """The rows as columns, made once: a report reads some hundred of them."""
        for row in self.rows if not self._columns else ():
            step = row["step"]
            for key, value in row.items():
                steps, values = self._columns.setdefault(key, ([], []))
                steps.append(step)
                values.append(value)
        return self._columns

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
        FileNotFoundError: there is no `metrics.jsonl`, and no failure is known.
        CheckpointError: a line before the last is damaged.
    """
    root = Path(run_dir)
    path = root / "metrics.jsonl"
    if not is_run(root):
        raise FileNotFoundError(f"{path} does not exist: {root} is not a run directory, or its run never began a step.")
    summary, status = root / "summary.json", read_object(root / "status.json")
    return RunRecord(
        name=root.resolve().name,
        rows=_rows(path, max_rows),
        summary=Summary.load(summary) if summary.exists() else None,
        config_text=_text(root / "config.yaml"),
        overrides=_overrides(root),
        state=run_state(root, status),
        config=read_object(root / "config.json"),
        starts=read_object(root / "run.json").get("starts", ()),
        status=status,
        notes=_text(root / "notes.md").strip(),
        failure=_text(root / FAILURE).strip() or str(read_object(summary).get("failed", "")),
    )


def _rows(path: Path, max_rows: int | None) -> list[dict[str, Any]]:
    if not path.exists():  # of a run that failed before its first step
        return []
    return read_metrics(path) if max_rows is None else read_some_metrics(path, max_rows)


def run_state(root: Path, status: Mapping[str, Any]) -> str:
    """See `RunRecord.state`. A summary that is older than the metrics is of the part before a resume."""
    summary, metrics = root / "summary.json", root / "metrics.jsonl"
    if (root / FAILURE).exists():
        return "failed"
    if summary.exists() and (not metrics.exists() or summary.stat().st_mtime >= metrics.stat().st_mtime):
        ended = read_object(summary)
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


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file is missing or was cut short by a crash."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, histogram bins as integers. A last line without its end is left out."""
    rows = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                break
            try:
                rows.append(parse_row(line))
            except ValueError as error:
                raise CheckpointError(f"{path} line {number} is not a metrics object ({error}).") from error
    return rows


def read_some_metrics(path: Path, max_rows: int) -> list[dict[str, Any]]:
    """The first and last line, those with an evaluation, and about `max_rows` others; damaged lines are left out."""
    rows, size = [], path.stat().st_size
    offset, next_due, newest = 0, 0.0, b""
    with path.open("rb") as lines:
        for line in lines:
            newest = line if line.endswith(b"\n") else newest
            if offset >= next_due or b'"eval/score"' in line:
                rows.append(line)
                next_due = max(next_due, offset + size / max_rows)
            offset += len(line)
    found = {}
    for line in [*rows, newest]:
        try:
            row = parse_row(line.decode("utf-8", errors="replace"))
            found[row["step"], "eval/score" in row] = row
        except ValueError:
            continue
    return sorted(found.values(), key=lambda row: row["step"])


def parse_row(line: str) -> dict[str, Any]:
    """One line of `metrics.jsonl`. Raises ValueError: not a JSON object with a `step`."""
    row = json.loads(line)
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError("no object with a step")
    return {key: {int(k): n for k, n in value.items()} if isinstance(value, dict) else value
            for key, value in row.items()}


def _overrides(root: Path) -> list[str]:
    """Command-line overrides of the run: a YAML list of plain strings, which needs no YAML reader."""
    lines = _text(root / "overrides.yaml").splitlines()
    return [line[2:].strip().strip("'\"") for line in lines if line.startswith("- ")]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
