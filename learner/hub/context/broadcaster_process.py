"""The hub's broadcaster process: starting, ending and watching it."""

from __future__ import annotations

from pathlib import Path

from learner.hub.context.settings import HubSettings, write_settings
from streamrl.parent_watch import program
from streamrl.processes import Child

START_S = 300.0
"""Deadline of its first report: it loads its libraries and opens its device."""
EXIT_NO_MEMORY = 10
"""Exit status of a broadcaster for which the GPU has no memory: another start would end alike."""
_LONGEST_TICK_S = 1.0


class BroadcasterProcess:
    """The child process; it ends with the hub, also after kill -9 of the hub."""

    def __init__(self, settings: HubSettings) -> None:
        path = Path(settings.run_dir) / "broadcaster_settings.json"
        write_settings(settings, path)
        self._process = Child([*program("learner.broadcaster"), str(path)]).process

    def alive(self) -> bool:
        """Return whether it runs; a call after its end also reaps it."""
        return self._process.poll() is None

    def exit_status(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it and return at once: a process that the GPU driver holds may take minutes to end, or never do."""
        self._process.kill()


class BroadcasterWatch:
    """Liveness detector for the broadcaster process: reports and `now` in, whether it hangs out. Pure.

    Of a long gap between two ticks only one second counts: a hub that was itself stopped has read no report.

    Args:
        silence_s: longer without a report, and the broadcaster hangs.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._limit_s = START_S
        self._ticked_at: float | None = None
        self.silent_s = 0.0  # since its last report

    def started(self) -> None:
        """Note a new process: until its first report the longer deadline of a start applies."""
        self._limit_s, self.silent_s = START_S, 0.0

    def heard(self) -> None:
        """Note a report of any kind."""
        self._limit_s, self.silent_s = self._silence_s, 0.0

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self._ticked_at is not None:
            self.silent_s += min(now - self._ticked_at, _LONGEST_TICK_S)
        self._ticked_at = now

    @property
    def hangs(self) -> bool:
        return self.silent_s > self._limit_s
