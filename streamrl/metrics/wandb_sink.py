"""Weights & Biases as a sink; the only module that imports wandb, and only when a sink is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.metrics.sinks import Row, Sink

MODES = ("offline", "online", "disabled")


def open_wandb(*, mode: str, project: str, run_id: str, run_dir: str | os.PathLike[str],
               name: str | None = None) -> Sink | None:
    """A wandb sink, or None under mode `disabled`, where wandb need not be installed.

    Args:
        mode: offline writes into `run_dir/wandb` and needs no account; online talks to the service.
        run_id: a resumed run with the same id goes on in the same record.
    Raises:
        ConfigError: unknown mode, or wandb is not installed.
    """
    if mode not in MODES:
        raise ConfigError(f"Unknown wandb mode {mode!r}: choose one of {', '.join(MODES)}.")
    return None if mode == "disabled" else WandbSink(mode, project, run_id, Path(run_dir), name or run_id)


class WandbSink(Sink):
    """One wandb run. Use `open_wandb`."""

    def __init__(self, mode: str, project: str, run_id: str, run_dir: Path, name: str) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ConfigError("tracking.wandb.enabled=true, but wandb is not installed: pip install streamrl[track], "
                              "or set tracking.wandb.enabled=false.") from error
        self._wandb = wandb
        self._run = wandb.init(project=project, name=name, id=run_id, mode=mode, resume="allow", dir=str(run_dir))

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log_metrics(self, step: int, metrics: Row) -> None:
        self._run.log({k: self._value(v) for k, v in metrics.items() if k != "step"}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def log_artifact(self, path: Path, name: str) -> None:
        artifact = self._wandb.Artifact(name, type="file")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        self._run.finish()

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        # Bins are integers, so bin k is drawn from k to k + 1; absent bins are zeros.
        low, high = min(value), max(value)
        counts = [value.get(k, 0) for k in range(low, high + 1)]
        return self._wandb.Histogram(np_histogram=(counts, list(range(low, high + 2))))
