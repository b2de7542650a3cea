"""The two halves of an update: gradients of one micro-batch, and the optimizer step that all ranks take or skip.

The loss is normalised by counts of the whole batch before the first backward pass, so gradients of micro-batches and
ranks simply add up. FSDP2 divides the sum over ranks by their number; the loss is multiplied by it, which cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.model import Policy
from learner.objective import Objective
from learner.optimizer import Schedule
from learner.packing import MicroBatch
from learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        grad_norm: global norm before clipping; nan or inf if the step was skipped.
        skipped: True on all ranks if any gradient was not finite; weights and moments are untouched then.
        lr: learning rate of the step.
    """

    grad_norm: float
    skipped: bool
    lr: float


def forward_backward(policy: Policy, micro_batch: MicroBatch, objective: Objective) -> float:
    """Add the gradients of one micro-batch; returns its share of the loss. Statistics go to the objective."""
    batch = micro_batch.to(objective.ranks.device)
    logprobs, entropy = policy(
        batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures
    )
    loss = objective.loss(batch, logprobs, entropy)
    (loss * objective.ranks.world).backward()
    return float(loss.detach())


@torch.no_grad()
def prepare(policy: Policy, micro_batches: Iterable[MicroBatch], objective: Objective) -> None:
    """Whole-batch quantities that need the policy's log-probs, for surrogates that have any; else costs nothing."""
    if not objective.needs_policy_logprobs:
        return
    for micro_batch in micro_batches:
        batch = micro_batch.to(objective.ranks.device)
        logprobs, _ = policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures
        )
        objective.observe(batch, logprobs)
    objective.close_observation()


@torch.no_grad()
def optimizer_step(
    policy: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, *, step: int, max_grad_norm: float,
    ranks: Ranks,
) -> StepResult:
    """Clip the global gradient norm, step, and forget the gradients.

    Args:
        step: the version before the update; the learning rate depends on nothing else.
        max_grad_norm: gradients are scaled down to this norm; 0 or less does not clip.
    """
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = grad_norm(gradients, ranks)
    lr = schedule.lr_at(step)
    skipped = not math.isfinite(norm)
    if not skipped:
        if 0 < max_grad_norm < norm:
            torch._foreach_mul_([_local(g) for g in gradients], max_grad_norm / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(norm, skipped, lr)


def grad_norm(gradients: list[Tensor], ranks: Ranks) -> float:
    """Euclidean norm over all gradients, each shard counted once; a collective call if any is sharded."""
    sharded = sum_of_squares([g for g in gradients if isinstance(g, DTensor)])
    whole = sum_of_squares([g for g in gradients if not isinstance(g, DTensor)])
    return math.sqrt(ranks.all_reduce([sharded])[0] + whole)


def sum_of_squares(tensors: list[Tensor]) -> float:
    """Sum of squares of the local parts, accumulated in float64 over tensors."""
    parts = [_local(t) for t in tensors]
    parts = [p for p in parts if p.numel()]
    if not parts:
        return 0.0
    return float(torch.stack(torch._foreach_norm(parts)).double().square().sum())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
