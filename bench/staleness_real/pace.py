"""A tracker that forces the lag: the learner does not begin a step before the actors are as far ahead as they may be.

How old data are at `staleness.eta=24` would otherwise depend on who is faster, learner or actors, and so on the arm
and on what else the machine does. The learner waits here, between two steps, until the hub holds all groups of the
allowed lead but one batch; with a lookahead of 0 groups every token then has a lag between eta - SLACK and eta once the
lead is full. Nothing else of the run is changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.staleness_real.cells import SLACK
from streamrl.metrics.sinks import Row, Sink, TrackedRun

POLL_S = 0.05
GIVE_UP_S = 300.0


class Pacer(Sink):
    """Holds each step back. Counts are the hub's: those of the row, and while it waits those of `status.json`."""

    def __init__(self, run_dir: Path) -> None:
        self._status = run_dir / "status.json"
        self._groups_per_step = self._eta = self._num_groups = 0

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._groups_per_step = config["rollout"]["num_prompts_per_step"]
        self._eta = config["staleness"]["eta"]
        self._num_groups = config["trainer"]["num_steps"] * self._groups_per_step

    def log_metrics(self, step: int, metrics: Row) -> None:
        held, lead = metrics.get("hub/num_groups_accepted", 0.0), step + self._eta
        if held >= min((lead - SLACK + 2) * self._groups_per_step, self._num_groups):
            return
        wanted, began = min(lead * self._groups_per_step, self._num_groups), time.monotonic()
        while self._held() < wanted and time.monotonic() - began < GIVE_UP_S:
            time.sleep(POLL_S)  # the file changes once a second; it has no event to wait for

    def _held(self) -> float:
        return json.loads(self._status.read_text())["counters"]["num_groups_accepted"]


def open_pacer(run: TrackedRun) -> Pacer:
    """The factory that `tracking.trackers` names."""
    return Pacer(run.run_dir)
