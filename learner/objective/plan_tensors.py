"""Numbers of the whole batch that must precede the first backward pass: baselines, scales, row weights, moments.

Nearly everything comes from the plan, which every rank has in full, so ranks agree without communication and a split
into micro-batches changes nothing. What is measured on trajectories (weights, norms, shaped rewards) is exchanged once
and then treated alike. The order is the objective's: rewards are shaped before a baseline looks at them, and
advantages are whitened last.

Legend: P trajectories of the whole batch, R of them on this rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.data.trajectories import Trajectory
from learner.objective.advantages import Advantages, RowAdvantages, discounts
from learner.objective.options import WEIGHTED_BASELINES
from learner.objective.regularizers import Regularizers
from learner.objective.token_batch import PassOutputs, TokenBatch
from learner.ranks.mesh import Ranks
from streamrl.algorithms import (
    Estimator,
    aggregation_weights,
    kl_estimate,
    reward_to_go,
    rho_bar_for_ess,
    seq_tis_weights,
    whiten,
)
from streamrl.algorithms.groups import group_advantages, group_mean, leave_one_out, opob
from streamrl.algorithms.staleness import split_by_lag
from streamrl.algorithms.types import ClipBounds, Moments
from streamrl.config.schema import AdvantageConfig, Discount
from streamrl.errors import ContentError
from streamrl.messages import PlanRow

MicroBatchKey = tuple[int, ...]
"""`MicroBatch.trajectory_ids`: identifies a micro-batch during a step."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanTensors:
    """The plan as tensors, and where this rank's trajectories stand in it.

    Attributes:
        scores: float64 [P] total reward.
        group_ids: int64 [P]; equal numbers share a baseline.
        pool_ids: int64 [P]; who is alone in a group is compared with those of equal numbers. None: with all.
        num_tokens: int64 [P] action tokens.
        places: int64 [R] of this rank's trajectories among the P.
        weights: float32 [R] factor of each token loss of the trajectory in the loss of its minibatch.
        minibatches: int64 [R] number of the minibatch that each trajectory belongs to.
        num_minibatches: of the whole batch.
        head_lags: int64 [R] largest lag that the hub promised to train, of each trajectory, at the first step.
    """

    scores: Tensor
    group_ids: Tensor
    num_tokens: Tensor
    places: Tensor
    weights: Tensor
    head_lags: Tensor
    minibatches: Tensor
    num_minibatches: int
    pool_ids: Tensor | None = None

    def gather(self, observed: Sequence[TokenBatch], measured: Callable[[TokenBatch], Tensor], ranks: Ranks) -> Tensor:
        """Values `measured` [S] on the trajectories of each micro-batch, as one float64 [P]; a collective call."""
        mine = torch.zeros(len(self.places), dtype=torch.float64)
        for tokens in observed:
            mine[list(tokens.micro.trajectory_ids)] = measured(tokens).double()
        return exchange(self.places, mine, len(self.scores), ranks)


def of_plan(
    trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], ranks: Ranks, *, avg_level: str, max_new_tokens: int,
    spread_budget: int | None = None, filter_truncated: bool = False, passed: Tensor | None = None,
) -> PlanTensors:
    """The plan as tensors; a collective call under `filter_truncated`.

    Args:
        filter_truncated: truncated trajectories count in baselines, but neither in the loss nor in what it is divided
            by.
        passed: bool [P]; trajectories without it are treated as truncated ones then are.
        spread_budget: groups whose head lags differ by more are split for the baseline; None keeps all whole.
    Raises:
        ContentError: the plan and this rank's share disagree: every count would be wrong.
    """
    places = places_of(trajectories, plan, ranks.dp_rank)
    group_ids = torch.tensor([row.group_id for row in plan], dtype=torch.int64)
    counts = torch.tensor([row.num_action_tokens for row in plan], dtype=torch.int64)
    kept = torch.ones(len(plan), dtype=torch.bool) if passed is None else passed
    if filter_truncated:
        truncated = torch.tensor([float(row.truncated) for row in trajectories])
        kept = kept & (exchange(places, truncated, len(plan), ranks) == 0)
    # Fixed here from the whole batch: a mean taken in each micro-batch would depend on how the batch was split.
    weights, minibatches = torch.zeros(len(plan)), torch.tensor([row.minibatch for row in plan])
    for number in minibatches.unique().tolist():  # each is the mean of an optimizer step of its own
        chosen = kept & (minibatches == number)
        weights[chosen] = aggregation_weights(
            counts[chosen], mode=avg_level, group_ids=group_ids[chosen], max_tokens=max_new_tokens
        )
    # float64: a baseline subtracts nearly equal numbers.
    scores = torch.tensor([row.reward for row in plan], dtype=torch.float64)
    head_lags = torch.tensor([row.head_lag for row in plan], dtype=torch.int64)
    if spread_budget is not None:
        group_ids = split_by_lag(group_ids, head_lags, budget=spread_budget)
    return PlanTensors(
        scores, group_ids, counts, places, weights[places], head_lags[places], minibatches[places],
        num_minibatches=int(minibatches.max()) + 1 if len(plan) else 1,
    )


def exchange(places: Tensor, mine: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
    """Values [R, ...] of every rank, which stand at int64 `places` [R] of the P, as float64 [P, ...]; a collective."""
    # Places travel with the values, because each rank holds another part of the plan, in any order.
    width = math.prod(mine.shape[1:])
    flat = torch.cat([places.double()[:, None], mine.double().cpu().view(len(mine), width)], dim=1).flatten()
    whole = torch.zeros(num_rows, *mine.shape[1:], dtype=torch.float64)
    for part in ranks.gather(flat.tolist()):
        rows = torch.tensor(part, dtype=torch.float64).view(-1, 1 + width)
        whole[rows[:, 0].long()] = rows[:, 1:].view(-1, *mine.shape[1:])
    return whole


# --- advantages of trajectories ---------------------------------------------------------------------------------------


def row_advantages(
    stats: PlanTensors, advantage: AdvantageConfig, estimator: Estimator, return_moments: Callable[[], Moments]
) -> RowAdvantages:
    """Advantages of this rank's trajectories by a baseline that needs no ratios.

    A weighted baseline stands in as leave-one-out until `weighted_row_advantages` has the current policy's ratios.
    `return_moments`, of the returns over the batch's tokens, is called if the estimator reads them.
    """
    scores, groups, pools = stats.scores, stats.group_ids, stats.pool_ids
    baseline = advantage.baseline
    if baseline == "batch":
        groups = torch.zeros_like(groups)  # one group of all
    if baseline in ("batch", *WEIGHTED_BASELINES):
        baseline = "leave_one_out"
    knobs: dict[str, Any] = {"baseline": baseline, "scale": advantage.scale}
    if estimator.of_rows:
        own = {name: value for name, value in knobs.items() if name in estimator.knobs}
        given = {"scores": scores, "group_ids": groups, "pool_ids": pools, "moments": None}
        values = estimator(given, **own, **advantage.options)
    else:
        values = group_advantages(scores, groups, pools, **knobs)
    if baseline == "none":
        base = torch.zeros_like(scores)
    else:
        base = (group_mean if baseline == "group_mean" else leave_one_out)(scores, groups, pools)
    rows = _of_this_rank(stats, values, base)
    # Whitening needs the moments of what is whitened: these advantages, or the returns of an estimator of rewards.
    whitens_rows = estimator.whitens and advantage.baseline != "none"
    if "moments" in estimator.inputs and not estimator.of_rows and not whitens_rows:
        rows = replace(rows, moments=return_moments())
    return rows


def weighted_row_advantages(
    stats: PlanTensors, advantage: AdvantageConfig, observed: Sequence[TokenBatch], ranks: Ranks
) -> RowAdvantages:
    """Advantages by a baseline that weighs siblings by their ratio to the current policy; a collective call."""
    def ratio(tokens: TokenBatch) -> Tensor:
        # The weight of a trajectory stands on each of its tokens.
        return seq_tis_weights(tokens.log_ratios, tokens.mask, cap=advantage.weight_cap).amax(1)

    ratios = stats.gather(observed, ratio, ranks)
    if advantage.baseline == "opob":
        square_norms = stats.gather(observed, lambda tokens: tokens.scored("square_norms").float(), ranks)
        base = opob(stats.scores, stats.group_ids, ratios, square_norms)
    else:
        base = leave_one_out(stats.scores, stats.group_ids, weights=ratios, min_ess=advantage.min_ess)
    return _of_this_rank(stats, stats.scores - base, base)


def _of_this_rank(stats: PlanTensors, values: Tensor, base: Tensor) -> RowAdvantages:
    # Every token of a trajectory has its advantage, so trajectories count by their length.
    counts = stats.num_tokens
    moments = Moments(
        count=counts.sum().double(), total=(counts * values).sum(), total_squares=(counts * values.square()).sum()
    )
    sizes = stats.group_ids.unique(return_counts=True)[1]
    alone = int((sizes == 1).sum()) / max(1, len(stats.group_ids))
    return RowAdvantages(values[stats.places], base[stats.places], moments, fraction_alone=alone)


# --- advantages of agents ---------------------------------------------------------------------------------------------


def agent_advantages(
    rows: Sequence[Trajectory], stats: PlanTensors, advantage: AdvantageConfig, estimator: Estimator, ranks: Ranks
) -> RowAdvantages:
    """Advantages [R, U] of the turns of this rank's trajectories, U most turns of one; a collective call.

    An entry is one agent in one trajectory, with the rewards of its turns: entries stand in the place of trajectories
    wherever a baseline or a scale is computed. An agent that is in one trajectory of its group is compared with its
    entries of the whole batch, never with another agent's. The numbers of whole trajectories are means over their
    action tokens.
    """
    turns = [_agent_numbers(row) for row in rows]
    places = stats.places.tolist()
    flat = [value for place, row, agents in zip(places, rows, turns, strict=True)
            for agent, score, count in _agent_entries(row, agents) for value in (place, agent, score, count)]
    # Every rank computes all baselines from all entries, so they agree without another exchange.
    gathered = torch.cat([torch.tensor(part, dtype=torch.float64).view(-1, 4) for part in ranks.gather(flat)])
    entries = {(int(place), int(agent)): (score, count) for place, agent, score, count in gathered.tolist()}
    keys = sorted(entries)
    at = {key: number for number, key in enumerate(keys)}
    siblings = torch.tensor([[int(stats.group_ids[place]), agent] for place, agent in keys]).view(-1, 2)
    scores, counts = (torch.tensor([entries[key][part] for key in keys], dtype=torch.float64) for part in (0, 1))
    groups = siblings.unique(dim=0, return_inverse=True)[1]
    found = row_advantages(
        replace(stats, scores=scores, group_ids=groups, pool_ids=siblings[:, 1], num_tokens=counts.long(),
                places=torch.arange(len(keys))),
        advantage, estimator, lambda: return_moments(rows, advantage, ranks),
    )
    by_turn = torch.zeros(len(rows), max((len(agents) for agents in turns), default=0), dtype=torch.float64)
    whole = torch.zeros(2, len(rows), dtype=torch.float64)
    for number, (place, row, agents) in enumerate(zip(places, rows, turns, strict=True)):
        mine = torch.tensor([at[place, agent] for agent in agents], dtype=torch.int64)
        by_turn[number, : len(mine)] = found.advantages[mine]
        tokens = mine[torch.from_numpy(row.turns[row.mask])]
        if len(tokens):
            whole[:, number] = torch.stack([found.advantages[tokens].mean(), found.baseline[tokens].mean()])
    return RowAdvantages(whole[0], whole[1], found.moments, by_turn, found.fraction_alone)


def _agent_numbers(row: Trajectory) -> list[int]:
    """The agent of each turn, as a number that is the same on every rank; one agent where none has a name."""
    return [zlib.crc32(name.encode()) for name in row.agents or ("",) * max(1, row.num_turns)]


def _agent_entries(row: Trajectory, agents: Sequence[int]) -> list[tuple[int, float, int]]:
    """(agent, score, action tokens) of each agent of a trajectory."""
    of_token, rewards = np.array(agents)[row.turns], row.rewards.astype(np.float64)
    return [
        (agent, float(rewards[of_token == agent].sum()), int(np.count_nonzero(row.mask & (of_token == agent))))
        for agent in sorted(set(agents))
    ]


# --- what the scoring pass makes possible (collective calls) ----------------------------------------------------------


def fitted_rho_bar(stats: PlanTensors, observed: Sequence[TokenBatch], ranks: Ranks, *, target: float) -> float:
    """The truncation at which the batch's sequence weights reach that effective sample size."""
    gathered = stats.gather(observed, lambda tokens: tokens.log_ratios.sum(1), ranks)[:, None]
    return rho_bar_for_ess(gathered, torch.ones_like(gathered, dtype=torch.bool), ess_target=target)


def teacher_mean(observed: Sequence[tuple[MicroBatch, PassOutputs]], ranks: Ranks) -> float:
    """The mean log-ratio of behavior policy and teacher over all action tokens of the batch."""
    sums = torch.zeros(3, dtype=torch.float64)
    for micro, outputs in observed:
        assert outputs.teacher is not None, "the scoring pass brought no log-probs of the teacher"
        sums += _sums(kl_estimate(micro.behavior_logprobs, outputs.teacher, micro.mask, kind="k1"), micro.mask)
    moments = _sum_moments(sums.tolist(), ranks)
    return float(moments.total / moments.count.clamp(min=1.0))


def fitted_bounds(
    fit: Callable[..., ClipBounds], trusted: Sequence[Tensor], ranks: Ranks, knobs: Mapping[str, Any]
) -> ClipBounds:
    """Bounds of a surrogate from log-ratios and advantages [2, n] of the trusted tokens of each micro-batch."""
    # A fit may need the sorted ratios, which no sums can give: every trusted token is exchanged.
    mine = torch.cat([torch.zeros(2, 0, dtype=torch.float64), *(part.double() for part in trusted)], dim=1)
    gathered = [torch.tensor(flat, dtype=torch.float64).view(2, -1) for flat in ranks.gather(mine.flatten().tolist())]
    ratios, advantages = torch.cat(gathered, dim=1)
    return fit(ratios[None], advantages[None], torch.ones(1, ratios.numel(), dtype=torch.bool), **knobs)


def whitened(
    advantages: Mapping[MicroBatchKey, Advantages], observed: Sequence[TokenBatch], ranks: Ranks
) -> dict[MicroBatchKey, Advantages]:
    """Advantages with mean 0 and spread 1 over all action tokens of the batch."""
    masks = {tokens.micro.trajectory_ids: tokens.mask for tokens in observed}
    sums = torch.zeros(3, dtype=torch.float64)
    for key, found in advantages.items():
        sums += _sums(found.advantages, masks[key])
    moments = _sum_moments(sums.tolist(), ranks)
    return {
        key: replace(found, advantages=whiten(found.advantages, masks[key], moments=moments))
        for key, found in advantages.items()
    }


# --- moments ----------------------------------------------------------------------------------------------------------


def shaped_moments(
    advantage: AdvantageConfig, estimator: Estimator, observed: Sequence[TokenBatch], regularizers: Regularizers,
    ranks: Ranks,
) -> Moments:
    """Moments of the returns of rewards with the KL of each token off; a collective call."""
    sums = torch.zeros(3, dtype=torch.float64)
    for tokens in observed:
        gamma = discounts(advantage, estimator, tokens.micro)
        sums += _sums(reward_to_go(regularizers.shaped_rewards(tokens), tokens.mask, gamma=gamma), tokens.mask)
    return _sum_moments(sums.tolist(), ranks)


def return_moments(trajectories: Sequence[Trajectory], advantage: AdvantageConfig, ranks: Ranks) -> Moments:
    """Moments of the return-to-go over all action tokens of all ranks; a collective call."""
    gamma, at_turns = advantage.gamma, advantage.discount is Discount.turn
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
    return _sum_moments(sums.tolist(), ranks)


def _sum_moments(mine: Sequence[float], ranks: Ranks) -> Moments:
    return Moments(*(torch.tensor(value, dtype=torch.float64) for value in ranks.all_reduce(list(mine))))


def _sums(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over action tokens, float64 [3]."""
    chosen = values[mask].double()
    return torch.stack([mask.sum().double(), chosen.sum(), chosen.square().sum()])


def places_of(trajectories: Sequence[Trajectory], plan: Sequence[PlanRow], rank: int) -> Tensor:
    """The place of each trajectory in the plan, after a check that both say the same."""
    # The plan says who trains what; a trajectory that only one side knows would make every denominator wrong.
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
