"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.errors import ConfigError
from streamrl.metrics.sinks import Row, Sink, TrackedRun


def open_wandb(run: TrackedRun) -> Sink:
    """A wandb run with the id of ours, so that a resumed run continues its record.

    Raises:
        ConfigError: wandb is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ConfigError(
            "tracking.trackers names wandb (or tracking.wandb.enabled=true), but wandb is not installed: "
            "pip install streamrl[track], or leave it out."
        ) from error
    mode = run.settings["wandb"]["mode"]
    opened = wandb.init(
        project=run.project, name=run.run_dir.resolve().name, id=run.run_id, mode=mode, resume="allow",
        dir=str(run.run_dir),
    )
    return WandbSink(wandb, opened)


class WandbSink(Sink):
    """One wandb run; `open_wandb` opens it."""

    def __init__(self, wandb: Any, run: Any) -> None:
        self._wandb, self._run = wandb, run

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log_metrics(self, step: int, metrics: Row) -> None:
        self._run.log({key: self._value(value) for key, value in metrics.items() if key != "step"}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        # Bins are integers, so bin k is drawn from k to k + 1; absent bins are zeros.
        low, high = min(value), max(value)
        counts = [value.get(k, 0) for k in range(low, high + 1)]
        return self._wandb.Histogram(np_histogram=(counts, list(range(low, high + 2))))
