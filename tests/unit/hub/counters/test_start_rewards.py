"""Rewards that teach nothing at the beginning of a run: what the terminal says of them, and when."""

from collections import Counter

import pytest

from learner.hub.ledger.tables.filters import accuracy_range, zero_std
from learner.hub.observers.counters import Arrival, Arrivals, all_dropped, all_equal
from streamrl.messages import VersionRef
from tests.unit.hub.factories import FakeActor, joined, make_ledger


def finished(num_groups: int, **dropped: int) -> Counter[str]:
    return Counter(num_groups_completed=num_groups, **{f"num_dropped_{name}": num for name, num in dropped.items()})


@pytest.mark.parametrize(
    ("counts", "reward", "text"),
    [
        (finished(16, zero_std=16), 0.0, "16 groups finished, all dropped by filter.zero_std: every reward was 0; see "
                                         "streamrl samples"),
        (finished(8, accuracy_range=8), 1.0, "8 groups finished, all dropped by filter.accuracy_range: every reward "
                                             "was 1; see streamrl samples"),
        (finished(9, zero_std=4, accuracy_range=5), None,
         "9 groups finished, all dropped by filter.zero_std and filter.accuracy_range: see the rewards of each group; "
         "see streamrl samples"),
        (finished(7, zero_std=7), 0.0, ""),
        (finished(20, zero_std=19), None, ""),
        (finished(20, stale=20), 0.0, ""),  # no filter's doing
        (Counter(), None, ""),
    ],
)
def test_a_first_batch_that_never_comes_has_a_reason(counts: Counter[str], reward: float | None, text: str):
    assert all_dropped(counts, reward) == text


def test_three_steps_of_equal_rewards_are_told():
    def told(num_trained: int, reward: float | None) -> str:
        return all_equal(Counter(num_groups_trained=num_trained), reward, batch_size=16)

    assert told(48, 0.0).startswith("3 steps, and every reward was 0: equal rewards teach nothing")
    assert [told(47, 0.0), told(48, None), told(0, 0.0)] == ["", "", ""]


@pytest.mark.parametrize(("rewards", "equal"), [([], None), ([0.0, 0.0], 0.0), ([1.0], 1.0), ([0.0, 0.0, 0.5], None)])
def test_whether_all_rewards_are_equal_is_known_from_what_arrived(rewards: list[float], equal: float | None):
    arrivals = Arrivals()
    actor = FakeActor(make_ledger(), "a1", ref=VersionRef(1, 0))
    actor.join()
    if rewards:
        lease = actor.ask()[0]
        for reward in rewards:
            arrivals.group(Arrival("a", actor.group(lease, members=[0], rewards=[reward]), 1))

    assert arrivals.equal_reward == equal


@pytest.mark.parametrize(("keep_group", "setting"), [(zero_std(), "zero_std"), (accuracy_range(), "accuracy_range")])
def test_a_wait_says_how_many_groups_its_filter_dropped_since_the_last_batch(keep_group, setting: str):
    ledger = make_ledger(keep_group=keep_group, groups_per_batch=1, eta=0, window=0, max_lag=0)
    actor = joined(ledger, "a1", ref=VersionRef(1, 0))
    num = 0
    while num < 3:
        (lease,) = actor.ask()
        actor.finish(lease, rewards=[0.0, 0.0])
        num += 1

    assert f"0 of 1 groups have arrived, 3 more were dropped by filter.{setting}; " in ledger.wait_reason(0.0)
    ledger.cutter.counts_at_cut = ledger.counts.copy()
    assert "dropped" not in ledger.wait_reason(0.0)
