"""The lowest sandbox level of any actor, and a warning at the first that is weak."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from learner.hub.observe.observer import Observer
from streamrl.messages import SANDBOX_LEVEL
from streamrl.metrics.summary import WEAK_SANDBOX


class SandboxLevels(Observer):
    """Keeps the lowest level of the run; 0 while no program has run."""

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
