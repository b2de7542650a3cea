"""A fake `Run` for `learner.loop.update`: a real policy, objective and optimizer, without hub, files and clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from learner.data.packing import MicroBatch
from learner.model.optimizer import Schedule
from learner.model.policy import Policy
from learner.objective.objective import Objective
from learner.objective.scoring_pass import score_batch
from learner.ranks.mesh import Ranks
from streamrl.config.schema import Config


class FakeRun:
    """What the update of a batch asks of a run; `stepped` notes the versions inside the batch."""

    warming_up = False
    staleness = SimpleNamespace(lr_scale=lambda meter: 1.0)

    def __init__(
        self, policy: Policy, optimizer: torch.optim.Optimizer, schedule: Schedule, objective: Objective, *,
        num_epochs: int, version: int = 5, ranks: Ranks | None = None, max_grad_norm: float = 1.0,
    ) -> None:
        self.policy, self.optimizer, self.schedule, self.objective = policy, optimizer, schedule, objective
        self.version, self.ranks = version, ranks or Ranks()
        self.config = Config()
        self.config.learner.num_epochs = num_epochs
        self.config.policy.optimizer.max_grad_norm = max_grad_norm
        self.inside: list[tuple[int, bool]] = []

    def timed(self, _name: str) -> nullcontext:
        return nullcontext()

    def with_wire_precision(self) -> nullcontext:
        return nullcontext()

    def score(self, batch: Sequence[MicroBatch]) -> None:
        score_batch(self.policy, batch, self.objective)

    def fit_critic(self, _batch: Sequence[MicroBatch]) -> None:
        pass

    def poll(self) -> None:
        pass

    def stepped(self, version: int, *, skipped: bool) -> None:
        self.inside.append((version, skipped))
