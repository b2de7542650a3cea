"""Weights & Biases."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.metrics.samples import Sample
from streamrl.metrics.sinks import Row, Sink, TrackedRun, dense_histogram
from streamrl.metrics.trackers.sample_tables import COLUMNS, rows_of

log = logging.getLogger("streamrl.learner")


def open_wandb(run: TrackedRun) -> Sink:
    """A wandb run with the id of ours, so that a resumed run continues its record.

    A resumed run does some steps again. The server takes no step twice, so its record is first set back to where the
    run goes on; accounts and servers without that feature keep what they have.
    """
    import wandb

    online = run.settings["wandb"]["mode"] == "online"
    init = partial(
        wandb.init, project=run.project, name=run.run_dir.resolve().name, id=run.run_id,
        mode=run.settings["wandb"]["mode"], dir=str(run.run_dir),
    )
    if online and run.resume_step is not None:
        try:
            return WandbSink(wandb, init(resume_from=f"{run.run_id}?_step={run.resume_step}"), online=True)
        except Exception as error:  # of its own classes, which differ between releases
            log.warning(
                "wandb cannot set the record back to step %d (%s): it keeps the steps that are done again",
                run.resume_step, " ".join(str(error).split())[:200],
            )
    return WandbSink(wandb, init(resume="allow"), online=online)


class WandbSink(Sink):
    """One run of wandb, or of a library with its interface; `open_wandb` opens it."""

    def __init__(self, library: Any, run: Any, *, online: bool) -> None:
        self._library, self._run, self._online = library, run, online

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log_metrics(self, step: int, metrics: Row) -> None:
        self._run.log({key: self._value(value) for key, value in metrics.items() if key != "step"}, step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._run.log({"samples": self._library.Table(columns=list(COLUMNS), data=rows_of(samples))}, step=step)

    def log_artifact(self, path: Path) -> None:
        kind = "model" if path.is_dir() else "record"
        artifact = self._library.Artifact(f"{self._run.id}-{path.name}", type=kind)
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        add(str(path), policy="immutable")  # no second copy of the weights in a home directory
        self._run.log_artifact(artifact)

    def where(self) -> str:
        if self._online:
            return str(self._run.url)
        directory = Path(self._run.dir).parent  # of the run; its files are in a folder below
        return f"wandb sync {shlex.quote(str(directory))}"

    def close(self) -> None:
        self._run.finish()

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return self._library.Histogram(np_histogram=dense_histogram(value))
