"""Which actors may be believed about their weights: by the root of what they serve, and by their last probe. Pure.

    root     of INSTALLED, HELLO and every heartbeat; one that was not published for that version: no leases
    probe    an engine that does not compute with what was published is in quarantine: no leases until it passes again
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.messages import Probed, VersionRef

log = logging.getLogger("streamrl.hub")


@dataclass(slots=True)
class WeightHealth:
    """What is known of one incarnation of an actor."""

    incarnation: int
    wrong: VersionRef | None = None  # it named another root for this version
    failed: str = ""  # why it is in quarantine
    needs_score: bool = False  # only log-probs within the tolerance end it
    mean: float = 0.0
    largest: float = 0.0


class WeightHealthTable:
    """Standings of all actors.

    Args:
        root_of: the root published for a version; None if the hub does not know it (any more).
        tolerance: largest mean absolute difference of the probe's log-probs, in nats.
    """

    def __init__(self, root_of: Callable[[VersionRef], bytes | None], tolerance: float) -> None:
        self._root_of, self._tolerance = root_of, tolerance
        self._standings: dict[str, WeightHealth] = {}
        self.num_probes = self.num_probe_failures = 0

    def _standing(self, actor_id: str, incarnation: int) -> WeightHealth:
        """A new process has a clean slate."""
        found = self._standings.get(actor_id)
        if found is None or found.incarnation != incarnation:
            found = self._standings[actor_id] = WeightHealth(incarnation)
        return found

    def forget(self, actor_id: str) -> None:
        """It left for good."""
        self._standings.pop(actor_id, None)

    def quarantined(self, actor_id: str, incarnation: int) -> str:
        """Why this actor is in quarantine; "" if it is not."""
        found = self._standings.get(actor_id)
        return found.failed if found is not None and found.incarnation == incarnation else ""

    def wrong_root(self, actor_id: str, incarnation: int, ref: VersionRef, root: bytes) -> bool:
        """Whether it serves other bytes under this version than were published; the first time is said loudly.

        Args:
            root: b"" if it did not say: what it said before holds.
        """
        standing, published = self._standing(actor_id, incarnation), self._root_of(ref)
        if not root or published is None:
            return standing.wrong == ref
        if root == published:
            standing.wrong = None if standing.wrong == ref else standing.wrong
            return False
        if standing.wrong != ref:
            standing.wrong = ref
            log.error("%s says it serves %s with root %s, published was %s: it gets no leases until it installs again",
                      actor_id, ref, root.hex()[:8], published.hex()[:8])
        return True

    def usable(self, actor_id: str, incarnation: int, ref: VersionRef, root: bytes) -> bool:
        """Whether leases may rely on what this actor says it serves."""
        wrong = self.wrong_root(actor_id, incarnation, ref, root)
        return not wrong and not self.quarantined(actor_id, incarnation)

    def probed(self, actor_id: str, incarnation: int, ref: VersionRef, probe: Probed) -> bool:
        """Take in the outcome of a probe; False if the actor is in quarantine now."""
        standing = self._standing(actor_id, incarnation)
        scored = probe.mean is not None and probe.largest is not None
        far = scored and not probe.mean <= self._tolerance  # a NaN is far, too
        self.num_probes += 1
        if scored:
            standing.mean, standing.largest = float(probe.mean), float(probe.largest)
        if probe.failed or far:
            standing.failed = probe.failed or f"probe differs by {probe.mean:.3g} nats, allowed {self._tolerance:g}"
            standing.needs_score = standing.needs_score or far
            self.num_probe_failures += 1
            log.error("QUARANTINE: %s does not compute with version %s as published: %s. Its leases go to others and "
                      "it gets none until it passes a probe", actor_id, ref, standing.failed)
        elif standing.failed and (scored or not standing.needs_score):
            log.warning("%s passes its probe at version %s: it is out of quarantine", actor_id, ref)
            standing.failed, standing.needs_score = "", False
        return not standing.failed

    def metrics(self) -> dict[str, float]:
        """Counters, and the worst of the actors' last probes."""
        all_of_them = self._standings.values()
        return {
            "num_probes": float(self.num_probes),
            "num_probe_failures": float(self.num_probe_failures),
            "num_quarantined": float(sum(bool(standing.failed) for standing in all_of_them)),
            "probe_mean_difference": max((standing.mean for standing in all_of_them), default=0.0),
            "probe_largest_difference": max((standing.largest for standing in all_of_them), default=0.0),
        }
