"""What one row must know of the whole batch before the first backward pass: its credit and its weight in the loss.

Nearly everything here comes from the plan, which every rank has in full, so that ranks agree without talking and a
split into micro-batches changes nothing. What is measured on trajectories (weights, norms, shaped rewards) is exchanged
once and then treated alike.

Legend: P trajectories of the whole batch, R of them on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.data.trajectories import Trajectory
from learner.mesh import Ranks
from streamrl.algorithms import aggregation_weights, group_advantages, group_mean, leave_one_out, opob, split_by_lag
from streamrl.algorithms.types import Moments
from streamrl.errors import ContentError
from streamrl.messages import PlanRow

WEIGHTED_BASELINES = ("weighted_leave_one_out", "opob")
"""Baselines that need the current policy's ratios, hence a scoring pass."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchFacts:
    """The plan as tensors, and where this rank's trajectories stand in it.

    Attributes:
        scores: float64 [P] total reward.
        group_ids: int64 [P]; equal numbers share a baseline.
        num_tokens: int64 [P] action tokens.
        places: int64 [R] of this rank's trajectories among the P.
        weights: float32 [R] factor of each token loss of the trajectory in the batch's loss.
        head_lags: int64 [R] largest lag that the hub promised to train, of each trajectory.
    """

    scores: Tensor
    group_ids: Tensor
    num_tokens: Tensor
    places: Tensor
    weights: Tensor
    head_lags: Tensor

    def gather(self, mine: Tensor, ranks: Ranks) -> Tensor:
        """Values [R] of every rank's trajectories as one [P], the same on all ranks; a collective call."""
        flat = torch.stack([self.places.double(), mine.double().cpu()], dim=1).flatten()
        whole = torch.zeros(len(self.scores), dtype=torch.float64)
        for row in ranks.gather(flat.tolist()):
            pairs = torch.tensor(row, dtype=torch.float64).view(-1, 2)
            whole[pairs[:, 0].long()] = pairs[:, 1]
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class RowCredit:
    """Of this rank's trajectories: `(score - baseline) / scale` and the baseline, float64 [R].

    `moments` are the credit's over all action tokens of the batch.
    """

    credit: Tensor
    baseline: Tensor
    moments: Moments


def batch_facts(
    trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], *, avg_level: str, max_new_tokens: int, rank: int,
    spread_budget: int | None = None, left_out: Tensor | None = None,
) -> BatchFacts:
    """The plan as tensors.

    Args:
        left_out: bool [P] trajectories that count in baselines but neither in the loss nor in what it is divided by.
        spread_budget: groups whose head lags differ by more are split for the baseline; None keeps all whole.
    Raises:
        ContentError: the plan and this rank's share disagree: every count would be wrong.
    """
    places = _places(trajectories, plan, rank)
    group_ids = torch.tensor([row.group_id for row in plan], dtype=torch.int64)
    counts = torch.tensor([row.num_action_tokens for row in plan], dtype=torch.int64)
    kept = torch.ones(len(plan), dtype=torch.bool) if left_out is None else ~left_out
    weights = torch.zeros(len(plan))
    weights[kept] = aggregation_weights(
        counts[kept], mode=avg_level, group_ids=group_ids[kept], max_tokens=max_new_tokens
    )
    scores = torch.tensor([row.reward for row in plan], dtype=torch.float64)
    head_lags = torch.tensor([row.head_lag for row in plan], dtype=torch.int64)
    if spread_budget is not None:
        group_ids = split_by_lag(group_ids, head_lags, budget=spread_budget)
    return BatchFacts(scores, group_ids, counts, places, weights[places], head_lags[places])


def row_credit(
    facts: BatchFacts, scores: Tensor, *, baseline: str, scale: str, ratios: Tensor | None = None,
    square_norms: Tensor | None = None, min_ess: float = 2.0,
) -> RowCredit:
    """Credit of this rank's trajectories from everybody's scores.

    Args:
        scores: float64 [P], shaped or not.
        ratios, square_norms: [P], for the weighted baselines: truncated sequence ratios and `score_square_norms`.
        min_ess: below this count of effective siblings a weighted leave-one-out is a plain one.
    """
    groups = facts.group_ids
    if baseline in WEIGHTED_BASELINES:
        assert ratios is not None
        if baseline == "opob":
            assert square_norms is not None
            base = opob(scores, groups, ratios, square_norms)
        else:
            base = leave_one_out(scores, groups, weights=ratios, min_ess=min_ess)
        credit = scores - base
    else:
        credit = group_advantages(scores, groups, baseline=baseline, scale=scale)
        plain = {"none": lambda: torch.zeros_like(scores), "group_mean": lambda: group_mean(scores, groups),
                 "leave_one_out": lambda: leave_one_out(scores, groups)}
        base = plain[baseline]()
    counts = facts.num_tokens
    moments = Moments(
        count=counts.sum().double(), total=(counts * credit).sum(), total_squares=(counts * credit.square()).sum()
    )
    return RowCredit(credit[facts.places], base[facts.places], moments)


def return_moments(
    trajectories: Sequence[Trajectory], ranks: Ranks, *, gamma: float = 1.0, at_turns: bool = False
) -> Moments:
    """Moments of the return-to-go over all action tokens of all ranks; a collective call.

    Args:
        gamma: discount of every token, or with `at_turns` of the last action token of every turn.
    """
    sums = np.zeros(3)
    for row in trajectories:
        rewards, turns = row.rewards[row.mask].astype(np.float64), row.turns[row.mask]
        if gamma == 1.0:
            returns = rewards[::-1].cumsum()
        else:
            ends = np.append(turns[1:] != turns[:-1], True) | (not at_turns)
            returns, after = np.zeros(len(rewards)), 0.0
            for place in range(len(rewards) - 1, -1, -1):
                after = rewards[place] + (gamma if ends[place] else 1.0) * after
                returns[place] = after
        sums += (len(returns), returns.sum(), np.square(returns).sum())
    return sum_moments(sums.tolist(), ranks)


def sum_moments(mine: Sequence[float], ranks: Ranks) -> Moments:
    """Moments of all ranks from (count, total, total of squares) of this one; a collective call."""
    return Moments(*(torch.tensor(value, dtype=torch.float64) for value in ranks.all_reduce(list(mine))))


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
