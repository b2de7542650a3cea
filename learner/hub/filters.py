"""Which complete groups are worth training on. A filter takes a held group and gives a drop reason, or None to keep it.

What a filter drops leaves capacity at once and the stream supplies the next group; nothing waits for a refill.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from learner.hub.groups import HeldGroup

GroupFilter = Callable[[HeldGroup], str | None]


def keep_all(group: HeldGroup) -> str | None:
    """The filter that drops nothing."""
    return None


def zero_std(min_std: float = 1e-6) -> GroupFilter:
    """Drop groups whose rewards spread less than `min_std` (unbiased): no gradient in them. A single member is kept."""

    def judge(group: HeldGroup) -> str | None:
        rewards = np.array([member.reward for member in group.members], dtype=np.float64)
        # The lowest is taken off first, so that equal rewards have a spread of exactly zero.
        if len(rewards) > 1 and (rewards - rewards.min()).std(ddof=1) < min_std:
            return "zero_std"
        return None

    return judge


def accuracy_range(low: float = 0.01, high: float = 0.99) -> GroupFilter:
    """Drop groups whose mean accuracy is not strictly inside (low, high). DAPO, arXiv:2503.14476.

    Accuracy is a member's score `ans_acc`, else `score`, else its reward.
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
