"""Filters of complete groups: each takes a held group and gives a reason to drop it, or None to keep it.

What a filter drops leaves capacity at once, so the stream supplies the next group without waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from learner.hub.ledger.tables.groups import HeldGroup

GroupFilter = Callable[[HeldGroup], str | None]
REASONS = ("zero_std", "accuracy_range")
"""Of the filters below, whose settings have the same names."""


def dropped_by(counts: Counter[str], before: Counter[str] | None = None) -> tuple[int, str]:
    """Count groups that filters dropped since the counts before; also returns their settings, as `filter.zero_std`."""
    since = {name: counts[f"num_dropped_{name}"] - (before or Counter())[f"num_dropped_{name}"] for name in REASONS}
    return sum(since.values()), " and ".join(f"filter.{name}" for name, num in since.items() if num)


def zero_std(min_std: float = 1e-6, *, scores: Sequence[str] = ()) -> GroupFilter:
    """Drop groups whose rewards, or else all `scores` trained on, spread less than `min_std` (unbiased): no gradient.

    Rewards are those of the task: the learner takes the overlong penalty off later. A single member is kept.
    """

    def judge(group: HeldGroup) -> str | None:
        if len(group.members) < 2:
            return None
        columns = [[member.reward for member in group.members]]
        if scores:
            columns = [[member.scores.get(name, 0.0) for member in group.members] for name in scores]
        values = np.array(columns, dtype=np.float64)
        # The lowest is taken off first, so that equal rewards have a spread of exactly zero.
        spread = (values - values.min(axis=1, keepdims=True)).std(axis=1, ddof=1)
        return "zero_std" if (spread < min_std).all() else None

    return judge


def accuracy_range(low: float = 0.01, high: float = 0.99) -> GroupFilter:
    """Drop groups whose mean accuracy is not strictly inside (low, high). DAPO, arXiv:2503.14476.

    Accuracy is a member's score `ans_acc`, else `score`, else its reward; each is the sum over the member's turns, as
    evaluations report it.
    """
    if not low <= high:
        raise ValueError(f"low={low} and high={high} must satisfy low <= high")

    def judge(group: HeldGroup) -> str | None:
        accuracies = [
            member.scores.get("ans_acc", member.scores.get("score", member.reward)) for member in group.members
        ]
        return None if low < float(np.mean(accuracies)) < high else "accuracy_range"

    return judge


def first_of(*filters: GroupFilter) -> GroupFilter:
    """Ask several filters in turn; the first reason counts."""

    def judge(group: HeldGroup) -> str | None:
        return next((reason for one in filters if (reason := one(group)) is not None), None)

    return judge
