"""What one row must know of the whole batch before the first backward pass: its credit and its weight in the loss.

Everything here comes from the plan, which every rank has in full, so that ranks agree without talking and a split into
micro-batches changes nothing. Only return-to-go moments need a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.ranks import Ranks
from learner.trajectories import Trajectory
from streamrl.algorithms import aggregation_weights, group_advantages
from streamrl.algorithms.types import Moments
from streamrl.errors import ContentError
from streamrl.messages import PlanRow


@dataclass(frozen=True, slots=True, eq=False)
class BatchFacts:
    """Facts of this rank's trajectories [R], from the whole batch.

    Attributes:
        credit: float64 [R], (reward - baseline) / scale of the trajectory.
        weights: float32 [R], factor of each token loss of the trajectory in the batch's loss.
        moments: of the credit over all action tokens of the batch, for whitening.
    """

    credit: Tensor
    weights: Tensor
    moments: Moments


def batch_facts(
    trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], *, baseline: str, scale: str, avg_level: str,
    max_new_tokens: int, rank: int,
) -> BatchFacts:
    """Credit and weights of `trajectories`, in their order.

    Raises:
        ContentError: the plan and this rank's share disagree: every count would be wrong.
    """
    places = _places(trajectories, plan, rank)
    rewards = torch.tensor([row.reward for row in plan], dtype=torch.float64)
    group_ids = torch.tensor([row.group_id for row in plan], dtype=torch.int64)
    counts = torch.tensor([row.num_action_tokens for row in plan], dtype=torch.int64)
    credit = group_advantages(rewards, group_ids, baseline=baseline, scale=scale)
    weights = aggregation_weights(counts, mode=avg_level, group_ids=group_ids, max_tokens=max_new_tokens)
    moments = Moments(
        count=counts.sum().double(), total=(counts * credit).sum(), total_squares=(counts * credit.square()).sum()
    )
    return BatchFacts(credit[places], weights[places], moments)


def return_moments(trajectories: Sequence[Trajectory], ranks: Ranks) -> Moments:
    """Moments of the undiscounted return-to-go over all action tokens of all ranks; a collective call."""
    sums = np.zeros(3)
    for row in trajectories:
        returns = row.rewards[row.mask][::-1].astype(np.float64).cumsum()
        sums += (len(returns), returns.sum(), np.square(returns).sum())
    return Moments(*(torch.tensor(value, dtype=torch.float64) for value in ranks.all_reduce(sums.tolist())))


def _places(trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], rank: int) -> Tensor:
    """Where each trajectory stands in the plan, after checking that both tell the same story."""
    place_of = {(row.group_id, row.index): i for i, row in enumerate(plan) if row.rank == rank}
    held = {(row.group_id, row.index) for row in trajectories}
    if held != place_of.keys():
        missing, extra = sorted(place_of.keys() - held), sorted(held - place_of.keys())
        raise ContentError(
            "plan", f"rank {rank} holds other trajectories than the plan says: missing {missing[:4]}, extra {extra[:4]}"
        )
    for row in trajectories:
        planned = plan[place_of[row.group_id, row.index]]
        if planned.num_action_tokens != row.num_action_tokens:
            raise ContentError(
                "plan", f"group {row.group_id} member {row.index} has {row.num_action_tokens} action tokens, "
                f"the plan says {planned.num_action_tokens}",
            )
    return torch.tensor([place_of[row.group_id, row.index] for row in trajectories], dtype=torch.int64)
