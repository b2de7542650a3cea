"""The networks of a run: the policy, and beside it those that the estimator, the loss and the KL term need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.checkpoint.shards import training_tensors
from learner.model.critic import Critic
from learner.model.policy import Policy
from learner.model.reference import FrozenPolicy


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks that are trained and those they are compared with; None where nothing would read one."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    reference: FrozenPolicy | None = None
    proximal: FrozenPolicy | None = None
    teacher: FrozenPolicy | None = None

    @property
    def frozen(self) -> dict[str, FrozenPolicy | None]:
        """The policies that are only compared with, by the need of an objective that each meets."""
        return {"reference": self.reference, "proximal": self.proximal, "teacher": self.teacher}

    @property
    def shares_prompts(self) -> bool:
        """Whether all of them may read a prompt once for several answers."""
        networks = (self.policy, self.critic and self.critic.module, *self.frozen.values())
        return all(network.shares_prompts for network in networks if network is not None)

    def tensors(self, *, reference_moves: bool) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of everything that training changes, for a checkpoint."""
        moving = self.reference if reference_moves else None
        beside = [network for network in (self.critic, self.proximal, moving) if network is not None]
        return training_tensors(self.policy, self.optimizer, (pair for one in beside for pair in one.tensors()))
