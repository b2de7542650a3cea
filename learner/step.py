"""Gradients of one micro-batch.

The loss is normalized by counts of the whole batch before the first backward pass, so gradients of micro-batches and
ranks simply add up. FSDP2 divides the sum over ranks by their number; the loss is multiplied by it, which cancels.
"""

from __future__ import annotations

from learner.data.packing import MicroBatch
from learner.model.policy import Policy
from learner.objective.objective import Objective


def forward_backward(policy: Policy, micro_batch: MicroBatch, objective: Objective) -> float:
    """Add the gradients of one micro-batch; returns its share of the loss. Statistics go to the objective."""
    batch = micro_batch.to(objective.ranks.device)
    logprobs, entropy = policy(
        batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures
    )
    loss = objective.loss(batch, logprobs, entropy)
    (loss * objective.ranks.world).backward()
    return float(loss.detach())
