"""Numbers that need every micro-batch of every rank before the first gradient, from what the scoring pass saw.

Each function takes this rank's observations and gives the same answer on every rank; all are collective calls. The
order matters and is the objective's: rewards are shaped before a baseline looks at them, credit is whitened last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from learner.mesh import Ranks
from learner.objective.advantages import Advantages, discounts
from learner.objective.batch_stats import WEIGHTED_BASELINES, BatchFacts, RowCredit, row_credit, sum_moments
from learner.objective.regularizers import Regularizers
from learner.objective.scoring_pass import PassOutputs
from streamrl.algorithms import clip_from_budget, log_ratios, reward_to_go, rho_bar_for_ess, seq_tis_weights, whiten
from streamrl.algorithms.types import ClipBounds, Moments
from streamrl.config.schema import AdvantageConfig

Rows = tuple[int, ...]
"""`MicroBatch.trajectory_ids`: what a micro-batch is known by during a step."""


@dataclass(frozen=True, slots=True, eq=False)
class ObservedBatch:
    """One micro-batch, not empty, and what the networks said of it before the update."""

    batch: MicroBatch
    scored: PassOutputs

    @property
    def log_ratios(self) -> Tensor:
        """[S, A] of the policy to the behavior policy."""
        return log_ratios(self.batch.behavior_logprobs, self.scored.policy, self.batch.mask)


def plain_credit(advantage: AdvantageConfig, facts: BatchFacts, moments: Callable[[], Moments]) -> RowCredit:
    """Credit of whole trajectories by a baseline that needs no ratios; `moments` of returns, called if they are read.

    A weighted baseline stands in as leave-one-out until `weighted_credit` can be had.
    """
    baseline = "leave_one_out" if advantage.baseline in WEIGHTED_BASELINES else advantage.baseline
    credit = row_credit(facts, facts.scores, baseline=baseline, scale=advantage.scale)
    if advantage.estimator == "reinforce_pp" and advantage.baseline == "none":
        credit = replace(credit, moments=moments())
    return credit


def shaped_facts(
    facts: BatchFacts, seen: Iterable[ObservedBatch], regularizers: Regularizers, ranks: Ranks
) -> BatchFacts:
    """The facts with the KL of each whole trajectory off its score."""
    penalties = torch.zeros(len(facts.places), dtype=torch.float64)
    for one in seen:
        penalties[list(one.batch.trajectory_ids)] = regularizers.row_penalties(one.batch, one.scored).cpu()
    return replace(facts, scores=facts.scores - facts.gather(penalties, ranks))


def shaped_moments(
    advantage: AdvantageConfig, seen: Iterable[ObservedBatch], regularizers: Regularizers, ranks: Ranks
) -> Moments:
    """Moments of the returns of rewards with the KL of each token off."""
    sums = torch.zeros(3, dtype=torch.float64)
    for one in seen:
        rewards = regularizers.shaped_rewards(one.batch, one.scored)
        sums += _sums(reward_to_go(rewards, one.batch.mask, gamma=discounts(advantage, one.batch)), one.batch.mask)
    return sum_moments(sums.tolist(), ranks)


def weighted_credit(
    advantage: AdvantageConfig, facts: BatchFacts, seen: Iterable[ObservedBatch], ranks: Ranks
) -> RowCredit:
    """Credit by a baseline that weighs siblings by their ratio to the current policy."""
    mine, norms = torch.zeros(len(facts.places)), torch.zeros(len(facts.places))
    for one in seen:
        rows = list(one.batch.trajectory_ids)
        weights = seq_tis_weights(one.log_ratios, one.batch.mask, cap=advantage.weight_cap)
        mine[rows] = weights.amax(1).cpu()  # one number a row, on each of its tokens
        if one.scored.square_norms is not None:
            norms[rows] = one.scored.square_norms.float().cpu()
    return row_credit(
        facts, facts.scores, baseline=advantage.baseline, scale="none", ratios=facts.gather(mine, ranks),
        square_norms=facts.gather(norms, ranks), min_ess=advantage.min_ess,
    )


def fitted_rho_bar(facts: BatchFacts, seen: Iterable[ObservedBatch], ranks: Ranks, *, target: float) -> float:
    """The truncation at which the batch's sequence weights reach that effective sample size."""
    sums = torch.zeros(len(facts.places))
    for one in seen:
        sums[list(one.batch.trajectory_ids)] = one.log_ratios.sum(1).cpu()
    everyone = facts.gather(sums, ranks)[:, None]
    return rho_bar_for_ess(everyone, torch.ones_like(everyone, dtype=torch.bool), ess_target=target)


def whitened(
    credited: Mapping[Rows, Advantages], seen: Mapping[Rows, ObservedBatch], ranks: Ranks
) -> dict[Rows, Advantages]:
    """Advantages with mean 0 and spread 1 over all action tokens of the batch."""
    sums = torch.zeros(3, dtype=torch.float64)
    for rows, one in credited.items():
        sums += _sums(one.advantages, seen[rows].batch.mask)
    moments = sum_moments(sums.tolist(), ranks)
    return {
        rows: replace(one, advantages=whiten(one.advantages, seen[rows].batch.mask, moments=moments))
        for rows, one in credited.items()
    }


def fitted_clip(trusted: Sequence[Tensor], ranks: Ranks, options: Mapping[str, Any]) -> ClipBounds:
    """Clip bounds from log-ratios and advantages [2, n] of the trusted tokens of each micro-batch."""
    mine = torch.cat([torch.zeros(2, 0, dtype=torch.float64), *(one.double().cpu() for one in trusted)], dim=1)
    everyone = [torch.tensor(flat, dtype=torch.float64).view(2, -1) for flat in ranks.gather(mine.flatten().tolist())]
    ell, advantages = torch.cat(everyone, dim=1)
    return clip_from_budget(ell[None], advantages[None], torch.ones(1, ell.numel(), dtype=torch.bool), **options)


def _sums(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over action tokens, float64 [3]."""
    chosen = values[mask].double().cpu()
    return torch.stack([torch.tensor(float(chosen.numel())).double(), chosen.sum(), chosen.square().sum()])
