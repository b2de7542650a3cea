"""The bound eta + ceil(W / B): met with equality by the ledger, broken by every shortcut.

`max_lag` is out of the way here, so that the hard check cannot hide what admission and consumption let through.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from learner.hub.books import Actor
from learner.hub.groups import GroupRecord, GroupState
from learner.hub.ledger import Ledger
from tests.unit.hub.samples import settings
from tests.unit.hub.world import World

CASES = [(1, 0, 0), (2, 0, 2), (1, 1, 0), (2, 1, 1), (2, 1, 2), (3, 2, 3), (2, 2, 5)]


class GrantsByTheLearnersVersion(Ledger):
    """Wrong: believes that every actor has the newest weights."""

    def _version_for_grant(self, actor: Actor) -> int:
        return self.version


class ConsumesInOrderOfCompletion(Ledger):
    """Wrong: what is finished first is trained first."""

    def _hold(self, record: GroupRecord) -> None:
        self.completed = [*getattr(self, "completed", []), record.group_id]
        super()._hold(record)

    def _consumable(self) -> Iterator[GroupRecord]:
        for group_id in self.completed if hasattr(self, "completed") else ():
            record = self.groups.live.get(group_id)
            if record is not None and record.state is GroupState.HELD:
                yield record


def worst_lag(kind: type[Ledger], case: tuple[int, int, int], *, num_walks: int) -> tuple[int, int]:
    """Largest head lag of any trained token, and the bound. One actor is lazy about weights, one about old groups."""
    groups_per_batch, eta, window = case
    chosen = settings(groups_per_batch=groups_per_batch, group_size=1, eta=eta, window=window, max_lag=1000)
    worst, num_trained = 0, 0
    for number in range(num_walks):
        rng = Random(f"{case}/{number}")
        world = World(chosen, kind=kind, with_filter=number % 2 == 1)
        for name in ("lazy", "brisk"):
            world.join(name)
        for _ in range(900):
            name = rng.choice(["lazy", "brisk", "brisk"])
            move = rng.choice(["ask", "finish", "finish", "install", "train"])
            if name == "lazy" and move in ("install", "finish") and rng.random() < 0.9:
                continue
            world.move(name, move, -1 if rng.random() < 0.8 else 0)
            if rng.random() < 0.02:
                world.fault("restart", "lazy", 0)
        worst = max(worst, *world.head_lags, 0)
        num_trained += len(world.head_lags)
    assert num_trained > 20 * num_walks, f"only {num_trained} groups were trained in {num_walks} walks"
    return worst, chosen.lag_bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: "B{} eta{} W{}".format(*case))
def test_no_trained_token_is_older_than_the_bound(case):
    worst, bound = worst_lag(Ledger, case, num_walks=20)

    assert worst <= bound


def test_the_bound_is_not_loose():
    worst, bound = worst_lag(Ledger, (2, 1, 2), num_walks=40)

    assert worst == bound == 2


@pytest.mark.parametrize("wrong", [GrantsByTheLearnersVersion, ConsumesInOrderOfCompletion])
def test_a_shortcut_breaks_the_bound(wrong):
    worst, bound = worst_lag(wrong, (2, 1, 2), num_walks=20)

    assert worst > bound, f"{wrong.__name__} kept the bound of {bound}: this test has lost its teeth"


def test_strictly_synchronous_training_has_no_lag_at_all():
    for window in (0, 1, 4):
        worst, _ = worst_lag(Ledger, (2, 0, window), num_walks=10)
        assert worst == 0
