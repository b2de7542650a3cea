"""AdamW and the learning rate as a pure function of the step: nothing about the schedule needs saving."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from streamrl.config.schema import OptimizerConfig, SchedulerConfig
from streamrl.errors import ConfigError

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine_with_min_lr": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Name -> share of the way from the peak down to `min_lr` that is left, at progress 0 .. 1 after the warm-up."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate of every step.

    Attributes:
        lr: peak, reached when the warm-up ends.
        num_steps: of the whole run; later steps keep the last rate.
        num_warmup_steps: steps of linear rise; step 0 already moves, at lr / (num_warmup_steps + 1).
        min_lr: where linear and cosine end.
    """

    name: str
    lr: float
    num_steps: int
    num_warmup_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ConfigError(f"policy.scheduler.name={self.name!r} is unknown: choose one of {', '.join(SCHEDULES)}.")
        if not 0.0 <= self.min_lr <= self.lr:
            raise ConfigError(f"policy.scheduler.min_lr={self.min_lr} must lie between 0 and the peak {self.lr}.")

    def lr_at(self, step: int) -> float:
        """The rate of the update that turns version `step` into `step + 1`."""
        if step < self.num_warmup_steps:
            return self.lr * (step + 1) / (self.num_warmup_steps + 1)
        span = max(1, self.num_steps - self.num_warmup_steps)
        left = SCHEDULES[self.name](min(1.0, (step - self.num_warmup_steps) / span))
        return self.min_lr + (self.lr - self.min_lr) * left


def make_schedule(optimizer: OptimizerConfig, scheduler: SchedulerConfig, *, num_steps: int) -> Schedule:
    """The schedule that the settings describe, over `num_steps` updates."""
    return Schedule(
        scheduler.name, optimizer.lr, num_steps, math.ceil(scheduler.warmup_ratio * num_steps), scheduler.min_lr
    )


def make_optimizer(policy: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; weight decay spares vectors (norms and biases)."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True,
    )
