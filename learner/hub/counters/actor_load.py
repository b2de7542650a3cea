"""Numbers of heartbeats over all actors: the use of their time, and the lowest level of their sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from learner.hub.counters.observer import Observer
from streamrl.messages import SANDBOX_LEVEL, Hello
from streamrl.metrics.summary import WEAK_SANDBOX

SUMS = {
    "up_s": "actor_s", "idle_s": "actor_idle_s", "starved_s": "actor_starved_s", "paused_s": "actor_paused_s",
    "generation_s": "episode_generation_s", "environment_s": "episode_environment_s",
}
"""Name in a heartbeat's `stats` -> name among the hub's counters; seconds since the actor was ready."""
P95 = "env_step_p95_s"


class ActorLoads(Observer):
    """Adds what each heartbeat tells beyond the one before, so that actors may come and go."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(SUMS.values(), 0.0)
        self._before: dict[str, Mapping[str, float]] = {}  # by the actor's name
        self._p95: dict[str, float] = {}

    def joined(self, hello: Hello, *, is_new: bool) -> None:
        if is_new and hello.run_id is None:  # it has done nothing yet: all that it tells from now on counts
            self._before[hello.actor_id] = {}

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        if "up_s" not in stats:  # a relay, or an actor that is still loading
            return
        before = self._before.get(actor_id)
        self._before[actor_id] = stats
        self._p95[actor_id] = stats.get(P95, 0.0)
        if before is None:  # an actor of an earlier start of the learner: what it did before does not count here
            return
        for name, total in SUMS.items():
            self._sums[total] += max(0.0, stats.get(name, 0.0) - before.get(name, 0.0))

    def remove(self, actor_id: str) -> None:
        """Drop a departed actor's counters."""
        self._before.pop(actor_id, None)
        if len(self._p95) > 1:  # of the last one they stay: the end of the run is reported after it
            self._p95.pop(actor_id, None)

    def metrics(self) -> dict[str, float]:
        """Report sums over the actors, and the step time of the one whose environments are slowest."""
        return {**self._sums, P95: max(self._p95.values(), default=0.0)}


class SandboxLevels(Observer):
    """Keeps the lowest sandbox level of any actor, 0 while no program has run; warns at the first that is weak."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify, self._lowest = notify, 0

    def beat(self, actor_id: str, stats: Mapping[str, float], now: float) -> None:
        level = int(stats.get(SANDBOX_LEVEL, 0))
        if level in (1, 2) and (not self._lowest or level < self._lowest):
            self._lowest = level
            if level == 1:
                self._notify(f"{actor_id}: {WEAK_SANDBOX}. See docs/sandbox.md")

    def metrics(self) -> dict[str, float]:
        return {"sandbox_level": float(self._lowest)}
