"""The ids that the scored tokens of a micro-batch were drawn from, where sampling was truncated.

Legend: M scored tokens, P of them with a set, K ids of all sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.data.trajectories import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TokenSets:
    """Every set holds its token once."""

    tokens: Tensor  # int64 [P] which of the scored tokens have a set; all others were drawn from every id
    owner: Tensor  # int64 [K] which of the P tokens an id is of
    ids: Tensor  # int64 [K]
    chosen: Tensor  # int64 [P] where in [K] the token itself is

    @property
    def sizes(self) -> Tensor:
        """Ids of each set, int64 [P]."""
        return torch.bincount(self.owner, minlength=len(self.tokens))

    def to(self, device: torch.device) -> TokenSets:
        return TokenSets(self.tokens.to(device), self.owner.to(device), self.ids.to(device), self.chosen.to(device))


def token_sets(rows: Sequence[Trajectory], targets: np.ndarray) -> TokenSets | None:
    """The sets of trajectories whose action tokens lie end to end in `targets`; None if there are none."""
    found, tokens, first = [], [], 0
    for row in rows:
        count = row.num_action_tokens
        if row.sets is not None:
            found.append(row.sets)
            tokens.append(np.arange(first, first + count))
        first += count
    if not found:
        return None
    places = np.concatenate(tokens)
    sizes, ids = (np.concatenate(part) for part in zip(*found, strict=True))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    chosen = np.flatnonzero(ids == targets[places][owner])
    return TokenSets(*(torch.from_numpy(one) for one in (places, owner, ids, chosen)))
