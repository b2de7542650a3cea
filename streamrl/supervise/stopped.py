"""Processes that stand still because something stopped them (SIGSTOP): they cannot tell, and nothing ends of it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from streamrl.processes import is_stopped, tree_of
from streamrl.supervise.child import Child

log = logging.getLogger("streamrl.launch")

LOOK_S = 1.0
GRACE_S = 5.0
"""More than the hub waits for a silent rank: its report comes first, and says what the others wait for."""


class StoppedProcesses:
    """Kills what has been stopped for too long, so that it can be started again.

    Args:
        silent_s: `learner.rank_silent_s`; 0 kills none.
    """

    def __init__(self, silent_s: float) -> None:
        self._limit_s = silent_s + GRACE_S if silent_s else 0.0
        self._since: dict[int, float] = {}
        self._looked_at = 0.0

    def end(self, learner: Child, actors: Sequence[Child], now: float) -> str:
        """Kill the stopped ones; returns why one of the learner had to be, "" if none was.

        Args:
            learner: with its ranks and its hub, which it has started.
            actors: without what they have started, which is the user's.
        """
        if not self._limit_s or now < self._looked_at + LOOK_S:
            return ""
        self._looked_at = now
        names = dict.fromkeys(tree_of(learner.process.pid), learner.name)
        names |= {one.process.pid: one.name for one in actors if one.process.poll() is None}
        self._since = {pid: self._since.get(pid, now) for pid in names if is_stopped(pid)}
        killed = ""
        for pid, since in self._since.items():
            if now - since < self._limit_s:
                continue
            why = f"process {pid} of {names[pid]} was stopped (SIGSTOP) for {now - since:.0f} s and has been killed"
            log.warning("%s", why)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed = why if names[pid] == learner.name else killed
        return killed
