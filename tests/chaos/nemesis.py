"""The schedule of faults: a function of the seed alone, so that a seed replays its faults at the same times."""

import random
from dataclasses import dataclass

from tests.chaos.crash_points import NAMES

WEIGHTS = {
    "kill_actors": 10, "stop_actors": 6, "twin": 3, "kill_hub": 2, "stop_hub": 3, "kill_learner": 2, "stop_learner": 2,
    "power_cut": 2, "reset": 9, "partition": 5, "one_way": 4, "delay": 6, "flip": 8, "duplicate": 9, "late_copy": 9,
    "truncate": 6, "crash": 16, "reset_all": 3,
}
"""How often each kind of fault is drawn."""
LASTING = ("stop_actors", "stop_hub", "stop_learner", "partition", "one_way", "delay")
"""Faults that are over after their `seconds`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at` seconds: what, to which process (a number), for how long or how many frames, at which crash point."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 0.0
    count: int = 0
    point: str = ""


def schedule(
    seed: int, seconds: float, num_faults: int, *, num_processes: int = 3, weights: dict[str, int] | None = None,
    points: tuple[str, ...] = NAMES,
) -> list[Fault]:
    """Faults in order of time, the first after half a second; crash points take turns over the seeds."""
    rng = random.Random(f"nemesis {seed}")
    table = WEIGHTS if weights is None else weights
    kinds = rng.choices(list(table), weights=list(table.values()), k=num_faults)
    times = sorted(rng.uniform(0.5, seconds) for _ in range(num_faults))
    turn = seed * 7
    faults = []
    for at, kind in zip(times, kinds, strict=True):
        point = ""
        if kind == "crash":
            point, turn = points[turn % len(points)], turn + 1
        faults.append(Fault(
            at, kind, rng.randrange(num_processes), rng.uniform(0.2, 1.8), rng.randint(1, 8), point,
        ))
    return faults
