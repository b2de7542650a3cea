"""Sums over what actors deliver, before age and filters decide about it; their differences are a step's means."""

from __future__ import annotations

import math
from collections import Counter

from learner.hub.observe.observer import Arrival, Observer
from streamrl.messages import EVAL_BIT, MemberStatus
from streamrl.metrics.hub_names import ARRIVED


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
