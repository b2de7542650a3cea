"""Recovery times of a written history: counted from the last fault that had begun, and held against its deadline."""

from typing import Any

import pytest

from tests.chaos.deadlines import SERVED_S, TRAINED_S, recoveries
from tests.chaos.nemesis import WEIGHTS


def fault(at: float, kind: str, seconds: float = 0.0) -> dict[str, Any]:
    return {"t": at, "role": "nemesis", "event": "fault", "kind": kind, "target": 0, "seconds": seconds}


def train(at: float) -> dict[str, Any]:
    return {"t": at, "role": "learner", "event": "train"}


def heard(at: float, incarnation: int, number: int = 0) -> dict[str, Any]:
    actor = f"actor-0-{number}"
    return {"t": at, "role": "hub", "event": "welcome", "actor": actor, "inc": incarnation}


@pytest.mark.parametrize(
    ("events", "times", "num_missed"),
    [
        ([fault(0, "reset"), train(2.5), train(9)], {"trained reset": [2.5]}, 0),
        ([fault(0, "reset"), train(3.5)], {"trained reset": [3.5]}, 1),
        ([fault(0, "partition", 1.5), train(4)], {"trained partition": [2.5]}, 0),  # counted from its end
        ([fault(0, "partition", 5.0), train(4)], {"trained partition": [0.0]}, 0),  # the others go on meanwhile
        ([fault(0, "reset"), fault(2, "kill_hub"), train(9)], {"trained reset": [7.0], "trained kill_hub": [7.0]}, 0),
        ([fault(0, "kill_hub"), fault(9, "reset"), train(21)], {"trained kill_hub": [12.0]}, 2),  # each of both
        ([heard(0, 1), fault(1, "kill_actors"), heard(2, 1), heard(6, 2)], {"served kill_actors": [5.0]}, 0),
        ([heard(0, 1), fault(1, "stop_actors", 1), heard(1.5, 1), heard(6, 1)], {"served stop_actors": [4.0]}, 1),
    ],
)
def test_times_and_what_is_late(events, times, num_missed):
    found = recoveries([*events], actors_per_process=1)
    assert {name: value for name, value in found.times.items() if name in times} == times
    assert len(found.missed) == num_missed, found.missed


def test_a_process_is_back_with_its_last_actor():
    events = [fault(0, "kill_actors"), heard(1, 1, number=0), heard(4, 2, number=1)]
    assert recoveries(events, actors_per_process=2).times == {"served kill_actors": [4.0]}


def test_every_fault_has_a_deadline():
    assert set(TRAINED_S) == set(WEIGHTS) and set(SERVED_S) <= set(WEIGHTS)
