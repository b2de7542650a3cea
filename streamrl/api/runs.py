"""A run directory read back for scripts and notebooks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config.load import from_plain
from streamrl.config.schema import Config
from streamrl.errors import StreamrlError
from streamrl.extension import did_you_mean
from streamrl.metrics.files import read_object_of
from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.summary import Summary
from streamrl.report.report import run_html, run_text
from streamrl.run_dirs import find_run_dir


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A finished, stopped or running run, read from its directory. Fields of its summary are its own, too.

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
    record: RunRecord

    def __getattr__(self, name: str) -> Any:
        if name in Summary.__slots__ or name in ("table", "headline"):
            if self.summary is None:
                raise AttributeError(f"the run has no {name!r} yet: it is {self.record.state}, without a summary")
            return getattr(self.summary, name)
        raise AttributeError(f"a run has no {name!r}")

    def __repr__(self) -> str:
        return run_text(self.record, self.directory)

    def _repr_html_(self) -> str:
        return run_html(self.record, self.directory)


class Metrics(dict[str, list[Any]]):
    """Key -> one value for each step, None where it did not write the key; `step` has no gap."""

    def __missing__(self, key: str) -> list[Any]:
        raise KeyError(f"this run has no metric {key!r}.{did_you_mean(key, self)}")

    def __repr__(self) -> str:
        keys = ", ".join(list(self)[:6])
        return f"<{len(self)} metrics of {len(self.get('step', ()))} steps: {keys}{', ...' if len(self) > 6 else ''}>"

    def frame(self) -> Any:
        """A pandas DataFrame with a column for each key. Raises StreamrlError: pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise StreamrlError("frame() needs pandas: pip install pandas, or use the lists themselves.") from error
        return pandas.DataFrame(dict(self))


def load_run(directory: str | os.PathLike[str]) -> Run:
    """Read a run by its directory, or by its name in `runs/`. Damaged lines of its files are left out and logged.

    Raises:
        RunNotFoundError: there is none, or one that never began a step; a FileNotFoundError, too.
        CheckpointError: its config.json is missing or damaged.
        ConfigError: the run was configured by a release with other settings.
    """
    root = find_run_dir(directory)
    record = read_run(root)
    values = read_object_of(root / "config.json")
    config = from_plain({key: value for key, value in values.items() if key != "versions"})
    steps: dict[int, dict[str, Any]] = {}
    for row in record.rows:  # the last step has two: what came after it, as its evaluation, is a row of its own
        steps.setdefault(row["step"], {}).update(row)
    metrics = Metrics({key: [row.get(key) for row in steps.values()] for key in record.keys()})
    model = root / "model"
    evaluations = [found for row in record.rows if (found := evaluation_of(row)) is not None]
    return Run(root, config, metrics, evaluations, record.summary, model if model.is_dir() else None, record)


def evaluation_of(row: Mapping[str, Any]) -> dict[str, float] | None:
    """The evaluation that a line of metrics holds; None without one."""
    named = {key.removeprefix("eval/"): value for key, value in row.items() if key.startswith("eval/")}
    return {"step": row["step"], **named} if named else None
