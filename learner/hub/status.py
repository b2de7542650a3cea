"""Two files in the run directory: `hub.json` (where to connect) and `status.json` (progress, and how the run ended)."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from learner.hub.context.hub_context import HubContext
from learner.hub.context.settings import HubSettings
from streamrl.metrics.files import read_object, write_atomic
from streamrl.transport.control import note


def write_hub_json(settings: HubSettings, endpoint: str, weights: str, ranks: str, control: str) -> None:
    """Write where actors and learner ranks connect, and where `streamrl status` and `streamrl drain` ask."""
    write_atomic(Path(settings.run_dir) / "hub.json", json.dumps({
        "connect": endpoint, "weights": weights, "ranks": ranks, "run_id": settings.run_id,
        "learner_epoch": settings.learner_epoch, "start": settings.started.start, **note(control),
    }, indent=1))


def write_status(hub: HubContext, now: float, *, state: str = "running") -> None:
    """Write what the live view shows in addition to the metrics; the final `state` is "finished" or "stopped".

    `lost` is why the learner's processes ended without a shutdown message; a new start may go well.
    """
    manifest, finding = hub.weights.manifest, hub.rank_watch.finding
    text = json.dumps({
        "run_id": hub.settings.run_id,
        "state": "starting" if manifest is None and state == "running" else state,
        "version": manifest.ref.version if manifest else 0,
        "total_steps": hub.settings.total_steps,
        "max_lag": hub.ledger.lag.rule.max_lag,
        "waiting_for": hub.waiting_for,
        "learner": next(iter(hub.rank_watch.sentences(now, hub.waiting_for)), ("", ""))[1],
        "lost": finding.cause if finding is not None and finding.lost else "",
        "cause": finding.cause if finding is not None else "",
        "notices": hub.notices,
        "actors": [
            [actor.actor_id, actor.state, actor.version, round(actor.tokens_per_s, 1), round(now - actor.heard_at, 1)]
            for actor in hub.connections.all()
        ],
        "counters": hub.ledger.counters(),
    })
    try:
        write_atomic(Path(hub.settings.run_dir) / "status.json", text)
    except OSError as error:  # a full disk: what a person reads is never worth the run
        hub.told.warning("status.json was not written, but the run continues: %s", error)


def note_lost(run_dir: Path, cause: str) -> None:
    """Write why the learner's processes end, for a hub that was killed and could not say so."""
    path = run_dir / "status.json"
    with suppress(OSError):  # then the learner is not started again
        write_atomic(path, json.dumps(read_object(path) | {"lost": cause, "cause": cause}))
