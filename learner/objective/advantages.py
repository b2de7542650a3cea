"""Advantages of tokens, by the estimator that the settings name.

    group scores   -> baseline, scale -> one number per trajectory -> broadcast, suffix product, or whitened
    token rewards  -> recursion over values of the critic        -> advantages, and targets of the critic

Estimators leave the token's own importance ratio out, because the surrogate carries it; those that apply it themselves
pair only with surrogates that do not (`check_pairing`).

Legend: S trajectories of a micro-batch, A most action tokens of one, R trajectories of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.data.packing import MicroBatch
from streamrl.algorithms import Estimator, broadcast_rows
from streamrl.algorithms.types import Moments
from streamrl.config.schema import AdvantageConfig, Discount
from streamrl.weights.gpu.pinned import upload


@dataclass(frozen=True, slots=True, eq=False)
class RowAdvantages:
    """Advantages of whole trajectories, `(score - baseline) / scale`, and the baseline; [R] or [S].

    `moments` are those of the advantages over all action tokens of the batch. `turns` [R, U] or [S, U] are those of
    single turns, where agents of a trajectory have advantages of their own. `fraction_alone` of the batch's
    trajectories (or of the agents in them) had no other of their group to be compared with.
    """

    advantages: Tensor
    baseline: Tensor
    moments: Moments
    turns: Tensor | None = None
    fraction_alone: float = 0.0

    def at(self, micro: MicroBatch) -> RowAdvantages:
        """The advantages of a micro-batch's trajectories, float32 and on its device."""
        places, device = torch.tensor(micro.trajectory_ids), micro.mask.device
        advantages, baseline = (upload(x[places].float(), device) for x in (self.advantages, self.baseline))
        turns = None if self.turns is None else upload(self.turns[places].float(), device)
        return RowAdvantages(advantages, baseline, self.moments, turns)

    def of_tokens(self, micro: MicroBatch) -> Tensor:
        """Advantages of every action token of the same micro-batch, [S, A]."""
        # One number a trajectory is broadcast; agents of a trajectory differ from turn to turn.
        if self.turns is None:
            return broadcast_rows(self.advantages, micro.mask)
        return self.turns.gather(1, micro.turns) * micro.mask


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """Advantages [S, A]; with a critic also its targets [S, A], the tokens it is trained on, and the returns."""

    advantages: Tensor
    targets: Tensor | None = None
    trained: Tensor | None = None  # bool [S, A]
    returns: Tensor | None = None  # [S, A] discounted sums of the rewards, as they were recorded


def discounts(settings: AdvantageConfig, estimator: Estimator, micro: MicroBatch) -> float | Tensor:
    """The discount of every token, or of the last action token of every turn only."""
    # Segments are discounted once each, by the estimator itself.
    if settings.discount is Discount.token or settings.gamma == 1.0 or estimator.of_segments:
        return settings.gamma
    return torch.where(turn_ends(micro.turns, micro.mask), settings.gamma, 1.0)


def turn_ends(ids: Tensor, mask: Tensor) -> Tensor:
    """bool [S, A], the last action token of every turn or segment."""
    ends = mask.clone()
    ends[:, :-1] &= (ids[:, 1:] != ids[:, :-1]) | ~mask[:, 1:]
    return ends
