"""A run directory read back for scripts and notebooks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config.load import from_plain
from streamrl.config.schema import Config
from streamrl.errors import StreamrlError
from streamrl.metrics.run_record import read_run
from streamrl.metrics.summary import Summary


@dataclass(frozen=True, slots=True)
class Run:
    """A finished, stopped or running run, read from its directory.

    Attributes:
        evaluations: one object for each, with `step`, `version`, `score`, `reward` and the rest of `eval/*`.
        summary: None while the run is not finished.
        model_path: the exported Hugging Face checkpoint; None without one (`checkpoint.export_hf`).
    """

    directory: Path
    config: Config
    metrics: Metrics
    evaluations: list[dict[str, float]]
    summary: Summary | None
    model_path: Path | None


class Metrics(dict[str, list[Any]]):
    """Key -> one value for each line of `metrics.jsonl`, None where the line lacks the key; `step` has no gap."""

    def frame(self) -> Any:
        """A pandas DataFrame with a column for each key. Raises StreamrlError: pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise StreamrlError("frame() needs pandas: pip install pandas, or use the lists themselves.") from error
        return pandas.DataFrame(dict(self))


def load_run(directory: str | os.PathLike[str]) -> Run:
    """Read a run directory.

    Raises:
        FileNotFoundError: it holds no run, or one that never began a step.
        ConfigError: the run was configured by a release with other settings.
    """
    root = Path(directory)
    record = read_run(root)
    values = json.loads((root / "config.json").read_text(encoding="utf-8"))
    config = from_plain({key: value for key, value in values.items() if key != "versions"})
    metrics = Metrics({key: [row.get(key) for row in record.rows] for key in record.keys()})
    model = root / "model"
    evaluated = [row for row in record.rows if any(key.startswith("eval/") for key in row)]
    return Run(root, config, metrics, [_evaluation(row) for row in evaluated], record.summary,
               model if model.is_dir() else None)


def _evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    named = {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
    return {"step": row["step"], **named}
