"""A run directory read back: `metrics.jsonl`, `summary.json` and the resolved configuration."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import CheckpointError
from streamrl.metrics.summary import Summary


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run left behind. `summary` is None while it runs, or if it was killed."""

    name: str
    rows: list[dict[str, Any]]
    summary: Summary | None
    config_text: str
    overrides: list[str]

    def keys(self) -> list[str]:
        """Every key that some line holds, in order of appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


def read_run(run_dir: str | os.PathLike[str]) -> RunRecord:
    """Read a finished, killed or running run.

    Raises:
        FileNotFoundError: there is no `metrics.jsonl`.
        CheckpointError: a line before the last is damaged.
    """
    root = Path(run_dir)
    path = root / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {root} is not a run directory, or its run never began a step.")
    summary = root / "summary.json"
    return RunRecord(
        name=root.resolve().name,
        rows=read_metrics(path),
        summary=Summary.load(summary) if summary.exists() else None,
        config_text=_text(root / "config.yaml"),
        overrides=_overrides(root),
    )


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
