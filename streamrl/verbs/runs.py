"""Lookup of the run that a command names, and whether it is running."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamrl.errors import ControlError
from streamrl.metrics.files import read_object, text_of
from streamrl.metrics.run_record import FAILURE, run_state
from streamrl.run_dirs import LAUNCH_LOCK, LAUNCH_NOTE, RUNS, find_run_dir, has_learner, is_held
from streamrl.transport.control import is_elsewhere, is_running

QUIET_S = 600.0
"""Hubs write `status.json` every second."""


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run directory, and the notes of its processes."""

    path: Path
    hub: dict[str, Any]
    launcher: dict[str, Any]
    status: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def has_hub(self) -> bool:
        if not self.hub or not is_elsewhere(self.hub):
            return bool(self.hub) and is_running(self.hub)
        over = self.status.get("state") in ("finished", "stopped") or self._is_quiet("hub.json")
        return has_learner(self.path) or not over

    @property
    def has_launcher(self) -> bool:
        if not self.launcher or not is_elsewhere(self.launcher):
            return bool(self.launcher) and is_running(self.launcher)
        return is_held(self.path / LAUNCH_LOCK) or not self._is_quiet(LAUNCH_NOTE)

    def _is_quiet(self, note: str) -> bool:
        """True if processes of another machine, whose ids say nothing here, have written nothing for long."""
        times = [one.stat().st_mtime for name in (note, "status.json") if (one := self.path / name).exists()]
        return datetime.now(UTC).timestamp() - max(times, default=0.0) > QUIET_S

    def require_hub(self) -> dict[str, Any]:
        """The note of its hub. Raises ControlError: the run is over, or has not got so far."""
        if self.has_hub:
            return self.hub
        if self.has_launcher:
            raise ControlError(f"{self.name} is still starting: its hub does not listen yet; try again in a moment")
        raise ControlError(f"{self.name} is over: {self.how_it_ended()}")

    def how_it_ended(self) -> str:
        """Describe the end of the run in words, with the command that continues it."""
        if not any((self.path / mark).exists() for mark in ("EPOCH", "metrics.jsonl")):
            return f"its learner never started; see {self.path}/logs/learner.log"
        state, summary = run_state(self.path, self.status), read_object(self.path / "summary.json")
        reached = f"{state} after {summary.get('steps', 'an unknown number of')} steps"
        if "version" in self.status:
            total = self.status.get("total_steps", 0)
            reached = f"{state} at version {self.status['version']} ({total} steps were asked for)"
        why = str(summary.get("failed", "") or self.status.get("cause", "") or summary.get("stopped", ""))
        if (self.path / FAILURE).exists():
            why = text_of(self.path / FAILURE).strip()
        reached += f": {why}" if why and state != "finished" else ""
        return reached if state == "finished" else f"{reached}. Go on with: streamrl resume {self.path}"


def find_run(word: str, root: Path = RUNS) -> NamedRun:
    """The run of a directory, or of a name in `runs/`. Raises RunNotFoundError if there is none."""
    path = find_run_dir(word, root)
    return NamedRun(path, *(read_object(path / name) for name in ("hub.json", LAUNCH_NOTE, "status.json")))
