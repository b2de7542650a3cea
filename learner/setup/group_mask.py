"""Groups that a filter would drop, kept in the batch without a gradient (`filter.refill=false`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.data.trajectories import Trajectory
from learner.hub.ledger.tables.filters import GroupFilter
from learner.hub.ledger.tables.groups import HeldGroup, HeldMember
from learner.hub.setup import group_filter
from learner.objective.plan_tensors import exchange, places_of
from learner.ranks.mesh import Ranks
from streamrl.config.schema import FilterConfig
from streamrl.messages import PlanRow


@dataclass(frozen=True, slots=True)
class GroupMask:
    """The filter whose groups stay in the batch without a gradient, and the names of the scores that it reads."""

    judge: GroupFilter
    scores: tuple[str, ...] = ()

    def __call__(self, trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], ranks: Ranks) -> Tensor:
        """Whether each trajectory's group passes, bool [P]; a collective call. Rewards are those of the task."""
        mine = torch.zeros(len(trajectories), 1 + len(self.scores), dtype=torch.float64)
        for number, row in enumerate(trajectories):
            accuracy = row.scores.get("ans_acc", row.scores.get("score", row.reward))
            values = [accuracy, *(row.scores.get(name, 0.0) for name in self.scores)]
            mine[number] = torch.tensor(values, dtype=torch.float64)
        found = exchange(places_of(trajectories, plan, ranks.dp_rank), mine, len(plan), ranks).tolist()
        groups: dict[int, list[HeldMember]] = {}
        for row, (accuracy, *values) in zip(plan, found, strict=True):
            scores = dict(zip(self.scores, values, strict=True))
            member = HeldMember(
                row.index,
                row.num_tokens,
                row.num_action_tokens,
                row.reward,
                {"ans_acc": accuracy, **scores},
                row.head_lag,
            )
            groups.setdefault(row.group_id, []).append(member)
        passes = {}
        for group, members in groups.items():
            held = HeldGroup(group, 0, tuple(members), ())
            passes[group] = self.judge(held) is None
        return torch.tensor([passes[row.group_id] for row in plan], dtype=torch.bool)


def group_mask(config: FilterConfig, scores: tuple[str, ...]) -> GroupMask | None:
    """The run's filters over the scores trained on, where the hub does not fill up what they drop."""
    judge = None if config.refill else group_filter(config, scores)
    return None if judge is None else GroupMask(judge, scores)
