"""How long the plane took to go on after each fault, against the deadlines of docs/reliability.md.

Two things are timed: `trained`, until the next batch is trained, and for faults of an actor process `served`, until the
hub has heard each of its actors again (of a process that was killed or doubled: the new one). Faults follow each other
faster than a learner starts, so time counts from the last fault that had begun by then, or from its end if it lasts,
and the longest deadline of those faults holds.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.chaos.history import Event

RESTART_S, NETWORK_S = 10.0, 3.0
TRAINED_S = {
    **dict.fromkeys(("kill_hub", "stop_hub", "kill_learner", "stop_learner", "power_cut", "crash"), RESTART_S),
    **dict.fromkeys(("kill_actors", "stop_actors", "twin", "reset", "reset_all", "partition", "one_way", "delay",
                     "flip", "truncate", "duplicate", "late_copy"), NETWORK_S),
}
"""Longest time to the next batch: 10 s after the learner's side had to start again, 3 s after anything else."""
SERVED_S = {"kill_actors": 10.0, "stop_actors": 3.0, "twin": 3.0}
"""Longest time until the hub has heard every actor of the process again."""


@dataclass
class Absent:
    """A fault of an actor process whose actors the hub has not heard since."""

    kind: str
    since: float
    over: float
    actors: set[str]
    former: frozenset[int]
    """Incarnations that were there before; none if these may answer."""


@dataclass
class Recoveries:
    """Times by "what kind", and those over their deadline."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    missed: list[str] = field(default_factory=list)


class _Reader:
    """One history, event by event."""

    def __init__(self, actors_per_process: int) -> None:
        self.found = Recoveries()
        self._per_process = actors_per_process
        self._faults: list[tuple[str, float, float]] = []  # kind, begin, end
        self._untrained: list[tuple[str, float]] = []
        self._absent: list[Absent] = []
        self._known: set[int] = set()

    def read(self, event: Event) -> None:
        name, at = event["event"], event["t"]
        if name == "fault":
            self._fault(event["kind"], at, event["seconds"], event["target"])
        elif name == "crash":
            self._fault("crash", at, 0.0, -1)
        elif name == "heal":
            self._faults = [(kind, begin, min(end, at)) for kind, begin, end in self._faults]
        elif name == "train":
            for kind, since in self._untrained:
                self._note("trained", kind, since, at, TRAINED_S[kind])
            self._untrained = []
        elif event["role"] == "hub" and name in ("welcome", "accept"):
            self._heard(event["actor"], event["inc"], at)

    def _fault(self, kind: str, at: float, seconds: float, target: int) -> None:
        self._faults.append((kind, at, at + seconds))
        self._untrained.append((kind, at))
        if kind in SERVED_S:
            names = {f"actor-{target}-{number}" for number in range(self._per_process)}
            former = frozenset() if kind == "stop_actors" else frozenset(self._known)
            # A process that is replaced again is awaited once: the older fault's actors never come.
            self._absent = [one for one in self._absent if not one.actors & names]
            self._absent.append(Absent(kind, at, at + seconds, names, former))

    def _heard(self, actor: str, incarnation: int, at: float) -> None:
        self._known.add(incarnation)
        for one in list(self._absent):
            if actor not in one.actors or incarnation in one.former or at < one.over:
                continue
            one.actors.discard(actor)
            if not one.actors:
                self._absent.remove(one)
                self._note("served", one.kind, one.since, at, SERVED_S[one.kind])

    def _note(self, what: str, kind: str, since: float, at: float, deadline: float) -> None:
        """One recovery, counted from the last fault that began in between."""
        between = [one for one in self._faults if one[1] >= since]
        last = max(end for _, _, end in between)
        seconds = max(0.0, at - last)
        allowed = max([deadline, *(TRAINED_S[other] for other, _, _ in between)])
        self.found.times[f"{what} {kind}"].append(seconds)
        if seconds > allowed:
            self.found.missed.append(f"{what} again {seconds:.1f} s after {kind}, {allowed:g} s are allowed")


def recoveries(events: Iterable[Event], actors_per_process: int) -> Recoveries:
    """Of a history in order of time."""
    reader = _Reader(actors_per_process)
    for event in events:
        reader.read(event)
    return reader.found
