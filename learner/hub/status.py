"""Two files in the run directory: `hub.json` (where to connect) and `status.json` (what goes on, and how it ended)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from learner.hub.settings import HubSettings
from streamrl.metrics.sinks import write_atomic

if TYPE_CHECKING:
    from learner.hub.server import HubServer


def write_hub_json(settings: HubSettings, endpoint: str, weights_endpoint: str) -> None:
    """Where actors connect."""
    write_atomic(Path(settings.run_dir) / "hub.json", json.dumps({
        "connect": endpoint, "weights": weights_endpoint, "run_id": settings.run_id, "pid": os.getpid(),
        "learner_epoch": settings.learner_epoch,
    }, indent=1))


def write_status(hub: HubServer, now: float, *, state: str = "running") -> None:
    """What the live view shows beside the metrics; for the last time with how it ended: finished or stopped."""
    settings = hub.settings
    manifest = hub.weights.manifest
    write_atomic(Path(settings.run_dir) / "status.json", json.dumps({
        "run_id": settings.run_id,
        "state": "starting" if manifest is None and state == "running" else state,
        "version": manifest.ref.version if manifest else 0,
        "total_steps": settings.total_steps,
        "max_lag": hub.ledger.max_lag,
        "waiting_for": hub.ranks.waiting_for,
        "actors": [
            [link.actor_id, link.state, link.version, round(link.tokens_per_s, 1), round(now - link.heard_at, 1)]
            for link in hub.control.links.all()
        ],
        "counters": hub.ledger.counters(),
    }))
