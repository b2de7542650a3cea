"""Which groups the filters drop, by the rewards and scores that members come with."""

import pytest

from learner.hub.ledger.tables.filters import GroupFilter, accuracy_range, zero_std
from learner.hub.ledger.tables.groups import HeldGroup, HeldMember


def group(*members: tuple[float, dict[str, float]]) -> HeldGroup:
    """One member for each (reward, scores)."""
    held = tuple(HeldMember(index, 8, 4, reward, scores, 0) for index, (reward, scores) in enumerate(members))
    return HeldGroup(0, 0, held, ())


WRONG_AND_LONG = group((-0.1, {"score": 0.0, "length": -1.0}), (-0.02, {"score": 0.0, "length": -0.2}))
HALF_RIGHT = group((1.0, {"score": 1.0}), (0.0, {"score": 0.0}))
ALL_RIGHT = group((1.0, {"score": 1.0}), (1.0, {"score": 1.0}))
THREE_TURNS = group((3.0, {"score": 3.0}), (0.0, {"score": 0.0}))  # scores are sums over an episode's turns


@pytest.mark.parametrize(
    ("judge", "judged", "fate"),
    [
        (zero_std(), ALL_RIGHT, "zero_std"),
        (zero_std(), HALF_RIGHT, None),
        (zero_std(), WRONG_AND_LONG, None),  # the reward has a term of its own for length
        (accuracy_range(0, 1), WRONG_AND_LONG, "accuracy_range"),  # the remedy
        (accuracy_range(0, 1), HALF_RIGHT, None),
        (accuracy_range(0, 1), ALL_RIGHT, "accuracy_range"),
        (accuracy_range(0, 1), THREE_TURNS, "accuracy_range"),
        (accuracy_range(0.03, 2.97), THREE_TURNS, None),
        (accuracy_range(0, 1), group((0.0, {"ans_acc": 1.0, "score": 0.0}), (0.0, {"ans_acc": 0.0})), None),
        (accuracy_range(0, 1), group((1.0, {}), (0.0, {})), None),
    ],
)
def test_a_filter_reads_the_tasks_rewards_or_its_scores(judge: GroupFilter, judged: HeldGroup, fate: str | None):
    assert judge(judged) == fate
