"""Calls of environments that do not return: told while they run, and the end of a run in which all of them hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from learner.hub.counters.observer import Observer
from streamrl.messages import ANSWERED_STEPS, HUNG_CALLS, SLOW_CALL_S, SLOW_CALLS, SLOWEST_CALL_S

REPEAT_S = 60.0
"""The shortest time between two reports of slow calls."""
LAST_CHANCE_S = 10.0
"""From the first call that was given up: if no step has returned by then, the run stops."""


class HungCalls(Observer):
    """Keeps what heartbeats say of calls of environments, by actor.

    Attributes:
        fatal: why the run must stop; "" while it need not.
    """

    def __init__(self, notify: Callable[[str], None], *, task: str, limit_s: float) -> None:
        self.fatal = ""
        self._notify = notify
        self._of, self._limit = f"of the environment of task {task}", f"env.step_timeout_s={limit_s:g}"
        self._stats: dict[str, Mapping[str, float]] = {}
        self._sums = Counter[str]()  # over the actors: thousands of them beat, and each beat asks for all
        self._told_at: float | None = None
        self._hung_at: float | None = None

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        self.remove(actor_id)
        self._stats[actor_id] = stats
        self._add(stats, 1)
        self._check_slow(now)
        self._check_hung(now)

    def remove(self, actor_id: str) -> None:
        self._add(self._stats.pop(actor_id, {}), -1)

    def _check_slow(self, now: float) -> None:
        num_slow = self._sums[SLOW_CALLS]
        if num_slow and (self._told_at is None or now - self._told_at > REPEAT_S):
            self._told_at = now
            longest = max(stats.get(SLOWEST_CALL_S, 0.0) for stats in self._stats.values())
            calls = "call" if num_slow == 1 else "calls"
            self._notify(
                f"{num_slow} {calls} {self._of} still running after {max(longest, SLOW_CALL_S):.0f} s; the limit is "
                f"{self._limit}"
            )

    def _check_hung(self, now: float) -> None:
        num_hung = self._sums[HUNG_CALLS]
        if not num_hung or self._sums[ANSWERED_STEPS]:
            return
        if self._hung_at is None:
            self._hung_at = now
        elif now - self._hung_at > LAST_CHANCE_S and not self.fatal:
            self.fatal = (
                f"every call {self._of} hangs, the run stops: {num_hung} were given up after {self._limit} and none "
                "has returned; fix what they wait for, or raise that limit"
            )
            self._notify(self.fatal)

    def _add(self, stats: Mapping[str, float], sign: int) -> None:
        for name in (SLOW_CALLS, HUNG_CALLS, ANSWERED_STEPS):
            self._sums[name] += sign * int(stats.get(name, 0.0))
