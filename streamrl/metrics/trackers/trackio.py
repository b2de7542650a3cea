"""trackio: a local dashboard without an account, in the directory that TRACKIO_DIR names, or trackio's own."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.metrics.sinks import Sink, TrackedRun
from streamrl.metrics.trackers.wandb import WandbSink


def open_trackio(run: TrackedRun) -> Sink:
    """A trackio run with the name of ours; a resumed run continues it."""
    import trackio

    return TrackioSink(trackio, run)


class TrackioSink(WandbSink):
    """One trackio run; it begins with the configuration, which trackio takes nowhere else."""

    def __init__(self, trackio: Any, run: TrackedRun) -> None:
        super().__init__(trackio, None, online=False)
        self._of = run

    def log_config(self, config: Mapping[str, Any]) -> None:
        # It knows runs by their names, and another run's directory, as in another sweep, may have had the same one.
        resume = "never" if self._of.resume_step is None else "allow"
        self._run = self._library.init(
            project=self._of.project, name=self._of.run_dir.resolve().name, config=dict(config), resume=resume,
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )

    def log_artifact(self, path: Path) -> None:
        """Keep none: it has tables and curves only."""

    def where(self) -> str:
        from trackio.utils import TRACKIO_DIR

        return f"TRACKIO_DIR={shlex.quote(str(TRACKIO_DIR))} trackio show --project {shlex.quote(self._of.project)}"

    def close(self) -> None:
        if self._run is not None:
            super().close()
