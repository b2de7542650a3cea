"""The learner's past weights, so that actors can sample from exactly the version that a lag asks for."""

from __future__ import annotations

import torch
from torch import Tensor


class History:
    """The last `depth` snapshots of all members, addressed by tick; ticks count from 0.

    A tick is one turn of the simulation. Where every member updates at every tick, tick and version are the same; where
    a member skips updates, `version` tells how many updates its snapshot of that tick had.
    """

    def __init__(self, depth: int, parameters: Tensor) -> None:
        members, size = parameters.shape
        self._depth = depth
        self._snapshots = torch.empty(depth, members, size)
        self._versions = torch.zeros(depth, members, dtype=torch.int64)
        self._members = torch.arange(members)
        self.newest = -1

    def push(self, parameters: Tensor, versions: Tensor) -> None:
        """Keep the weights [E, P] and versions [E] at the start of the next tick."""
        self.newest += 1
        self._snapshots[self.newest % self._depth] = parameters
        self._versions[self.newest % self._depth] = versions

    def weights_at(self, ticks: Tensor) -> Tensor:
        """Weights [E, P] of each member at its own tick; int64 [E]. Ticks before the first are the first."""
        return self._snapshots[self._slot(ticks), self._members]

    def versions_at(self, ticks: Tensor) -> Tensor:
        """Versions at those ticks; int64 [E]."""
        return self._versions[self._slot(ticks), self._members]

    def _slot(self, ticks: Tensor) -> Tensor:
        wanted = ticks.clamp(min=0)
        oldest = max(0, self.newest - self._depth + 1)
        assert oldest <= int(wanted.min()) and int(wanted.max()) <= self.newest, (
            f"ticks {wanted.tolist()} are outside the {oldest} to {self.newest} that are kept"
        )
        return wanted % self._depth
