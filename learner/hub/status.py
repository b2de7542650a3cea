"""Two files in the run directory: `hub.json` (where to connect) and `status.json` (what goes on, each second)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from learner.hub.settings import HubSettings
from streamrl.metrics.sinks import StatusFile

if TYPE_CHECKING:
    from learner.hub.server import HubServer


def _write(path: Path, content: dict[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1))
    os.replace(part, path)


def write_hub_json(settings: HubSettings, endpoint: str, weights_endpoint: str) -> None:
    """Where actors connect."""
    _write(Path(settings.run_dir) / "hub.json", {
        "connect": endpoint, "weights": weights_endpoint, "run_id": settings.run_id, "pid": os.getpid(),
        "learner_epoch": settings.learner_epoch,
    })


def write_status(hub: HubServer, now: float) -> None:
    """What the live view shows beside the metrics."""
    settings = hub.settings
    manifest = hub.weights.manifest
    status = hub.ranks.status(now)
    StatusFile(Path(settings.run_dir) / "status.json").write(
        run_id=settings.run_id, state="starting" if manifest is None else "running",
        version=manifest.ref.version if manifest else 0, total_steps=settings.total_steps,
        max_lag=settings.limits.max_lag, waiting_for=hub.ranks.waiting_for, counters=status.counters,
        actors=status.actors,
    )
