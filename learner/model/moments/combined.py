"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Several optimizers over disjoint parameters, stepped as one; groups and state are shared with the members."""

    def __init__(self, members: Iterable[Optimizer]) -> None:
        self.members = list(members)
        super().__init__([group for member in self.members for group in member.param_groups], {})
        for member in self.members:
            member.state = self.state

    def step(self, closure: Any = None) -> None:
        for member in self.members:
            member.step(closure)
