"""MLflow: a run in the store that MLFLOW_TRACKING_URI names, or in mlflow.db beside the run directory."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamrl.metrics.samples import Sample
from streamrl.metrics.sinks import Row, Sink, TrackedRun, flat
from streamrl.metrics.trackers.sample_tables import COLUMNS, rows_of

_RUN_ID = "streamrl.run_id"
_MAX_PARAMS, _MAX_CHARS, _MAX_NAME = 100, 500, 250
"""Limits of one call, of one value and of one name that every store of MLflow takes."""


def open_mlflow(run: TrackedRun) -> Sink:
    """The MLflow run with the id of ours, so that a resumed run continues its record."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a local record tells no one
    from mlflow import MlflowClient

    root = run.run_dir.resolve().parent
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"
    artifacts = (root / "mlflow-artifacts").as_uri() if uri.startswith("sqlite:") else None
    with _alone(root / "mlflow.lock"):
        client = MlflowClient(tracking_uri=uri)
        experiment = _experiment(client, run.project, artifacts)
    known = client.search_runs([experiment], f"tags.`{_RUN_ID}` = '{run.run_id}'", max_results=1)
    if known:
        client.update_run(known[0].info.run_id, status="RUNNING")
        return MlflowSink(client, uri, known[0].info.run_id, resumed=True)
    opened = client.create_run(experiment, run_name=run.run_dir.resolve().name, tags={_RUN_ID: run.run_id})
    return MlflowSink(client, uri, opened.info.run_id, resumed=False)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for other runs of this folder: a store that two make at once is broken."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _experiment(client: Any, name: str, artifacts: str | None) -> str:
    """The id of the experiment of this name, which is made if there is none, perhaps by another run meanwhile."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifacts)
        except Exception:  # of its own classes
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    return found.experiment_id


def _name(key: str) -> str:
    """The name for MLflow, which refuses a whole step over one with other letters, and one that is no path."""
    parts = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key[:_MAX_NAME]).split("/")
    return "/".join("_" if part in (".", "..") else part for part in parts if part) or "_"


class MlflowSink(Sink):
    """One MLflow run; `open_mlflow` opens it. It has no histograms: their percentiles are metrics of their own."""

    waits = True
    """A server that is away costs four minutes a call."""

    def __init__(self, client: Any, uri: str, run_id: str, *, resumed: bool) -> None:
        self._client, self._uri, self._run_id, self._resumed = client, uri, run_id, resumed

    def log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        named = {} if self._resumed else {_name(name): str(value)[:_MAX_CHARS] for name, value in flat(config)}
        params = [Param(name, value) for name, value in named.items()]  # which cannot be changed
        for at in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[at : at + _MAX_PARAMS])
        self._client.log_dict(self._run_id, dict(config), "config.json")

    def log_metrics(self, step: int, metrics: Row) -> None:
        from mlflow.entities import Metric

        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        self._client.log_batch(self._run_id, metrics=[
            Metric(_name(key), float(value), now_ms, step) for key, value in metrics.items()
            if key != "step" and not isinstance(value, Mapping)
        ])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = {name: [row[at] for row in rows_of(samples)] for at, name in enumerate(COLUMNS)}
        self._client.log_table(self._run_id, table, f"samples/step-{step:06d}.json")

    def log_artifact(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), path.name)
        else:
            self._client.log_artifact(self._run_id, str(path))

    def where(self) -> str:
        if not self._uri.startswith("sqlite:"):
            return f"run {self._run_id} at {self._uri}"
        return f"mlflow ui --backend-store-uri {shlex.quote(self._uri)}  (of the package mlflow)"

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
