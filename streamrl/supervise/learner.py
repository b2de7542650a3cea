"""Whether a learner that has ended is started again, and why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.metrics.files import read_object, text_of
from streamrl.supervise.child import Supervised
from streamrl.transport.control import is_running

STANDBY_AFTER_S = 30.0
HUB_ENDS_S = 10.0
"""The hub outlives its learner for a moment: it writes the cause, and must free its address."""


class Standby:
    """A learner process that has loaded its libraries and waits for its turn.

    Args:
        start: such a process.
    """

    def __init__(self, start: Callable[[], Supervised]) -> None:
        self._start = start
        self.child: Supervised | None = None
        self._due: float | None = None

    def poll(self, now: float) -> None:
        """Start one a while after the learner: not beside it, and its actors, while they load."""
        self._due = now + STANDBY_AFTER_S if self._due is None else self._due
        if self.child is None and now >= self._due:
            self.child = self._start()

    def take(self) -> Supervised | None:
        """The process, which begins now; None if there is none that could."""
        child, self.child, self._due = self.child, None, None
        if child is None or child.poll() is not None:
            return None
        try:
            child.send(b"\n", time.monotonic())
        except (EOFError, TimeoutError):
            return None
        return child

    def dismiss(self) -> None:
        """End a standby that is not needed any more, by its pipe or by force."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()  # it holds nothing yet


class LearnerRestarts:
    """Decides after each death. A learner that failed by itself would fail again, and is not restarted.

    Args:
        num_max: restarts without a newer version in between; see `launch.num_max_learner_restarts`.
    """

    def __init__(self, run_dir: Path, num_max: int) -> None:
        self._run_dir, self._num_max = run_dir, num_max
        self._num, self._from = 0, ("", 0)

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
        reached = (self.newest(), int(self._status().get("version", 0)))
        self._num = self._num + 1 if reached == self._from else 1
        self._from = reached
        return self._num <= self._num_max

    def newest(self) -> str:
        """The name of the newest checkpoint; "" before the first."""
        return text_of(self._run_dir / "LATEST").strip()

    def exit_reason(self) -> str:
        """The cause that the hub wrote about the process group's end; "" if it has none."""
        return str(self._status().get("cause", ""))

    def _status(self) -> dict[str, Any]:
        return read_object(self._run_dir / "status.json")
