"""trackio: a local dashboard without an account, in the directory that TRACKIO_DIR names, or trackio's own."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.metrics.samples import Sample
from streamrl.metrics.sinks import Row, Sink, TrackedRun, dense_histogram
from streamrl.metrics.trackers.sample_tables import COLUMNS, rows_of


def open_trackio(run: TrackedRun) -> Sink:
    """A trackio run with the name of ours; a resumed run continues it."""
    import trackio

    return TrackioSink(trackio, run)


class TrackioSink(Sink):
    """One trackio run; it begins with the configuration, which trackio takes nowhere else."""

    def __init__(self, trackio: Any, run: TrackedRun) -> None:
        self._trackio, self._of, self._run = trackio, run, None

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run = self._trackio.init(
            project=self._of.project, name=self._of.run_dir.resolve().name, config=dict(config), resume="allow",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )

    def log_metrics(self, step: int, metrics: Row) -> None:
        self._run.log({key: self._value(value) for key, value in metrics.items() if key != "step"}, step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._run.log({"samples": self._trackio.Table(columns=list(COLUMNS), data=rows_of(samples))}, step=step)

    def where(self) -> str:
        from trackio.utils import TRACKIO_DIR

        return f"TRACKIO_DIR={shlex.quote(str(TRACKIO_DIR))} trackio show --project {shlex.quote(self._of.project)}"

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return self._trackio.Histogram(np_histogram=dense_histogram(value))
