"""The training loop, on one screen: each line is a step of the algorithm; overlap and elasticity live elsewhere."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from learner.checkpoint.shards import reshard
from learner.data.packing import MicroBatch
from learner.model.gradients import BatchResult, optimizer_step, reduce_gradients
from learner.model.policy import Policy
from learner.objective.objective import Objective
from learner.run import Run
from streamrl.metrics.meter import Meter


def train(run: Run) -> bool:
    """Train until the steps are done (True) or a stop is requested (False)."""
    run.publish()  # a broken weight path fails here, before the first step
    if run.version == 0:
        run.evaluate(wait=True)
    for step in run.remaining_steps():
        taken = run.next_batch()  # waits; every group is inside the lag bound now
        if taken is None:
            return False
        share, rows = taken
        with run.timed("pack"):
            rows = run.objective.begin(rows, share.plan, version=run.version, lag_policy=run.staleness.lag_policy)
            run.choose_samples(share, rows)
            minibatches = run.pack(rows, share.plan)
        run.check_actors(rows)
        meter, result = update(run, minibatches)
        run.advance(share, result)
        run.regulate(meter, result)
        run.publish_if_due()  # actors fetch it while the next batch is awaited
        run.hub_trained(result)
        if not result.skipped:
            run.evaluate_if_due()
        run.record(step, meter, result)  # before the checkpoint, or a crash between them loses the row
        if not result.skipped:
            run.save_if_due()
    return True


def update(run: Run, minibatches: list[list[MicroBatch]]) -> tuple[Meter, BatchResult]:
    """The optimizer steps of a batch, one after each minibatch of each epoch; a collective call.

    Returns:
        The statistics of all steps together, and what the steps did.
    """
    first, batch = run.version, list(chain.from_iterable(minibatches))
    passes = minibatches * run.config.learner.num_epochs
    total, results = Meter(), []
    for number, minibatch in enumerate(passes):
        if number:
            run.objective.begin_step(number)
        with run.with_wire_precision():  # the policy that is scored is the one that actors sample from
            if number == 0:
                with run.timed("score"):
                    run.score(batch)  # for what all steps share: losses that must see the whole batch first, anchors
            with run.timed("forward_backward"):
                last = max((at for at, one in enumerate(minibatch) if one.has_gradient), default=0)
                for at, micro_batch in enumerate(minibatch):
                    reduce_gradients(run.policy, at == last or not run.config.learner.reduce_once)
                    forward_backward(run.policy, micro_batch, run.objective)
                    run.poll()
        if number == 0:
            with run.timed("critic"):
                run.fit_critic(batch)
        with run.timed("optimizer"):
            meter = run.objective.finish()
            result = optimizer_step(
                run.policy, run.optimizer, run.schedule, step=first + number, lr_scale=run.staleness.lr_scale(meter),
                max_grad_norm=run.config.policy.optimizer.max_grad_norm, ranks=run.ranks, frozen=run.warming_up,
            )
        total.merge(meter.totals_for_ranks())
        results.append(result)
        if number + 1 < len(passes):
            run.stepped(first + number + 1, skipped=result.skipped)
    return total, BatchResult(tuple(results))


def forward_backward(policy: Policy, micro_batch: MicroBatch, objective: Objective) -> Tensor:
    """Add the gradients, if it has any, of one micro-batch, which the objective measures; its share of the loss, 0-d.

    Nothing is read from the device: a GPU would run dry while it is waited for.

    The loss is normalized by counts of the whole batch, so gradients of micro-batches and ranks simply add up. FSDP2
    divides their sum over data-parallel ranks by the number of these; the loss is multiplied by it, which cancels.
    """
    batch = micro_batch.to(objective.ranks.device)
    with torch.set_grad_enabled(batch.has_gradient):
        logprobs, entropy = policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures
        )
        loss = objective.loss(batch, logprobs, entropy)
    if batch.has_gradient:
        (loss * objective.ranks.mesh.dp_size).backward()
    else:
        reshard(policy)  # no backward pass will free the gathered root, whose gradients would be lost with it
    return loss.detach()
