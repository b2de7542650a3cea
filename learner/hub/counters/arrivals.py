"""Sums over what actors deliver, before age and filters decide about it; their differences are a step's means.

And a check of the first rewards of a run: a sentence for the terminal if they can teach it nothing.
"""

from __future__ import annotations

import math
from collections import Counter

from learner.hub.counters.observer import Arrival, Observer
from learner.hub.ledger.tables.filters import dropped_by
from streamrl.messages import EVAL_BIT, MemberStatus
from streamrl.metrics.names import ARRIVED

ENOUGH_GROUPS = 8
ENOUGH_STEPS = 3


class Arrivals(Observer):
    """Training groups that are well-formed and no repetition, also those that are too old to be trained on."""

    def __init__(self) -> None:
        names = ("trajectories", "reward", "reward_squared", "score", "tokens", "bytes", "failed_groups")
        self._sums = Counter(dict.fromkeys(names, 0.0))
        self._lowest, self._highest = math.inf, -math.inf

    @property
    def equal_reward(self) -> float | None:
        """The reward of every trajectory so far; None before the first, and if they differ."""
        return self._lowest if self._lowest == self._highest else None

    def group(self, arrival: Arrival) -> None:
        group = arrival.group
        if group.group_id & EVAL_BIT:
            return
        members = [member for member in group.members if member.status != MemberStatus.ABORTED]
        rewards = [member.reward for member in members]
        self._lowest, self._highest = min([self._lowest, *rewards]), max([self._highest, *rewards])
        self._sums.update(
            trajectories=len(members), reward=sum(rewards), reward_squared=sum(reward * reward for reward in rewards),
            score=sum(member.scores.get("score", member.reward) for member in members),
            tokens=sum(end - start for member in members for start, end in member.mask), bytes=arrival.num_bytes,
            failed_groups=bool(group.num_failed_episodes),
        )

    def metrics(self) -> dict[str, float]:
        return {ARRIVED + name: value for name, value in self._sums.items()}


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
