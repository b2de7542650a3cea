"""Whitening of the advantages of each group, whose trajectories may be on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.objective.advantages import Advantages
from learner.objective.plan_tensors import MicroBatchKey, PlanTensors
from learner.objective.token_batch import TokenBatch
from learner.ranks.mesh import Ranks
from streamrl.algorithms import whiten
from streamrl.algorithms.types import Moments


def whitened_in_groups(
    advantages: Mapping[MicroBatchKey, Advantages],
    observed: Sequence[TokenBatch],
    stats: PlanTensors,
    ranks: Ranks,
) -> dict[MicroBatchKey, Advantages]:
    """Advantages with mean 0 and spread 1 over the action tokens of each group; a collective call."""
    groups = stats.group_ids.unique(return_inverse=True)[1]
    none = torch.zeros(int(groups.max()) + 1, dtype=torch.float64)

    def sums(power: int) -> Tensor:
        """Sums of the group's token values to this power, for each trajectory of this rank."""

        def of_rows(tokens: TokenBatch) -> Tensor:
            key = tokens.micro.trajectory_ids
            values = advantages[key].advantages.double()
            return (values.pow(power) * tokens.mask).sum(1)

        of_all = stats.gather(observed, of_rows, ranks)
        of_groups = none.index_add(0, groups, of_all)
        return of_groups[groups][stats.places]

    count, total, squares = sums(0), sums(1), sums(2)
    found = {}
    for tokens in observed:
        key, mask = tokens.micro.trajectory_ids, tokens.mask
        moments = Moments(*(
            of_rows[list(key)][:, None]
            for of_rows in (count, total, squares)
        ))
        values = whiten(
            advantages[key].advantages, mask, moments=moments
        )
        found[key] = replace(advantages[key], advantages=values)
    return found
