"""Whether a learner that has ended is started again from its newest checkpoint, and why."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from streamrl.metrics.run_record import read_object
from streamrl.transport.control import is_running

HUB_ENDS_S = 10.0
"""The hub outlives its learner for a moment: it writes the cause, and must free its address."""


class LearnerRestarts:
    """Decides after each death. A learner that failed by itself would fail again, and is not restarted.

    Args:
        num_max: restarts without a newer checkpoint in between; see `launch.num_max_learner_restarts`.
    """

    def __init__(self, run_dir: Path, num_max: int) -> None:
        self._run_dir, self._num_max = run_dir, num_max
        self._num, self._from = 0, ""

    def cause(self, code: int) -> str:
        """Why the learner is gone, if a new start may go well; "" if not. Waits for the end of its hub."""
        hub = read_object(self._run_dir / "hub.json")
        deadline = time.monotonic() + HUB_ENDS_S
        while is_running(hub) and time.monotonic() < deadline:
            time.sleep(0.05)  # not a child of this process: there is no event to wait for
        lost = str(self._status().get("lost", ""))
        if code >= 0:
            return lost
        why = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"the learner was killed by {signal.Signals(-code).name}{why}{f': {lost}' if lost else ''}"

    def allowed(self) -> bool:
        """Count one more restart; False if that is one too many."""
        newest = self.newest()
        self._num = self._num + 1 if newest == self._from else 1
        self._from = newest
        return self._num <= self._num_max

    def newest(self) -> str:
        """The name of the newest checkpoint; "" before the first."""
        latest = self._run_dir / "LATEST"
        return latest.read_text(errors="replace").strip() if latest.exists() else ""

    def what_ended_it(self) -> str:
        """What the hub wrote about the process group; "" if it has none."""
        return str(self._status().get("cause", ""))

    def _status(self) -> dict[str, Any]:
        return read_object(self._run_dir / "status.json")
