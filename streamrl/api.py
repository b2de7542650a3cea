"""The library's entry points for scripts and notebooks: train a run, read a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamrl.config.load import from_plain
from streamrl.config.schema import Config
from streamrl.errors import RunFailedError, StreamrlError
from streamrl.launch import EXIT_INTERRUPTED, launch_run
from streamrl.metrics.run_record import read_run
from streamrl.metrics.summary import Summary


def train(experiment: str | None = None, overrides: Sequence[str] = ()) -> Summary:
    """Do the run that `streamrl launch` does with these overrides, in the same processes, and wait for its end.

    Example:
        summary = streamrl.train(experiment="quickstart", overrides=["trainer.num_steps=5"])
        run = streamrl.load_run(summary.extra["run_dir"])

    Args:
        experiment: a file of configs/experiment/; None takes the defaults.
        overrides: `key=value`, as on the command line.
    Returns:
        the summary of the run, with its directory in `extra["run_dir"]`.
    Raises:
        ConfigError: a setting is unknown or impossible; nothing was started.
        RunFailedError: the run failed; its last lines are on standard error, its logs in the run directory.
        KeyboardInterrupt: after Ctrl-C, once everything is stopped; the run can be resumed.
    """
    chosen = [] if experiment is None else [f"experiment={experiment}"]
    run_dir, code = launch_run([*chosen, *overrides])
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"run.dir={run_dir} checkpoint.resume=true continues this run")
    if code != 0:
        raise RunFailedError(f"The run ended with status {code}: see {run_dir / 'logs'}", code)
    summary = Summary.load(run_dir / "summary.json")
    return replace(summary, extra={**summary.extra, "run_dir": str(run_dir)})


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
