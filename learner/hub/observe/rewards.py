"""Check of the first rewards of a run: a sentence for the terminal if they can teach it nothing."""

from __future__ import annotations

from collections import Counter

from learner.hub.ledger.tables.filters import dropped_by

ENOUGH_GROUPS = 8
ENOUGH_STEPS = 3


def all_dropped(counts: Counter[str], reward: float | None) -> str:
    """Say that so many groups were finished and a filter dropped every one of them; "" before.

    Args:
        reward: of every trajectory; None if they differ.
    """
    num, filters = dropped_by(counts)
    if num < ENOUGH_GROUPS or num < counts["num_groups_completed"]:
        return ""
    why = f"every reward was {reward:g}" if reward is not None else "see the rewards of each group"
    return f"{num} groups finished, all dropped by {filters}: {why}; see streamrl samples"


def all_equal(counts: Counter[str], reward: float | None, *, batch_size: int) -> str:
    """Say that so many batches went by in which every reward was the same; "" before, or if they differ."""
    num_steps = counts["num_groups_trained"] // batch_size
    if reward is None or num_steps < ENOUGH_STEPS:
        return ""
    return (f"{num_steps} steps, and every reward was {reward:g}: equal rewards teach nothing; see "
            "streamrl samples, and check the reward and the answers in the data")
