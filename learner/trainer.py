"""The trainer: recorded groups in, a policy of a newer version out. No hub, no socket, no file.

    plan      what all micro-batches of the batch share
    pack      this rank's micro-batches of each minibatch
    score     forward passes before the first gradient, only where the objective needs them
    step      for each minibatch of each epoch: gradients of its micro-batches, clip, optimizer step
    advance   the version, the averaged anchor, the reference

All of it is collective over the learner's ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from learner.checkpoint.shards import reshard
from learner.data.packing import MicroBatch, pack_minibatches
from learner.data.resized import REMEDY, check_split, halves, packed_passes
from learner.data.trajectories import Trajectory
from learner.model.gradients import (
    BatchResult,
    GradientCosine,
    can_restart,
    forget_passes,
    optimizer_step,
    reduce_gradients,
)
from learner.model.networks import Networks, sync_if_due
from learner.model.optimizer import Schedule
from learner.model.policy import Policy
from learner.objective.loss import micro_batch_loss
from learner.objective.objective import Objective
from learner.objective.plan import BatchPlan
from learner.objective.scoring_pass import score_batch
from learner.objective.shadow import Shadow
from learner.objective.statistics import StepStatistics, TrainedBatch
from learner.objective.token_batch import LagPolicy
from learner.publish.rounding import with_wire_precision
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter

log = logging.getLogger("streamrl.learner")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings that turn a batch into optimizer steps.

    Attributes:
        max_tokens, max_inference_tokens: of one micro-batch, and of one without gradient.
        num_minibatches, num_epochs: of one batch; their product is its number of optimizer steps.
        max_grad_norm: gradients are scaled down to this norm; 0 or less does not clip.
        reduce_once: ranks add their gradients up once a step instead of once a micro-batch.
        ewma_decay: of the averaged policy, if there is one.
        sync_reference_every: batches after which the reference becomes the policy; 0 is never.
        num_critic_warmup_steps: batches of which only the critic learns.
        gradient_cosine: compare each step's gradient with that of the step before.
        stop_kl: leave the rest of a batch's steps out once a step measured this KL of policy and behavior.
        compute_dtype, wire_dtype: in which the policy computes, and in which actors get it.
    """

    max_tokens: int
    num_minibatches: int = 1
    num_epochs: int = 1
    max_grad_norm: float = 1.0
    reduce_once: bool = False
    ewma_decay: float = 0.0
    sync_reference_every: int = 0
    num_critic_warmup_steps: int = 0
    gradient_cosine: bool = False
    stop_kl: float = math.inf
    compute_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.float32
    max_inference_tokens: int | None = None

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of one batch."""
        return self.num_minibatches * self.num_epochs


class Callbacks:
    """Methods that the trainer calls at fixed places inside a batch; these do nothing."""

    def planned(self, plan: BatchPlan, statistics: StepStatistics) -> None:
        """The batch is planned and packed, and has had no pass yet. A collective call."""

    def queued(self) -> None:
        """The work of a micro-batch is queued; must not wait."""

    def lr_scale(self, measured: Meter) -> float:
        """Factor on the learning rate of the optimizer step that `measured` is about."""
        return 1.0

    def stepped(self, version: int) -> None:
        """An optimizer step led to this version, and others of its batch follow. A collective call."""

    def on_batch_trained(self, measured: Meter, result: BatchResult) -> bool:
        """The batch is trained, and the version still that of before.

        Returns:
            whether its data is too stale for multipliers of constraints to integrate what it measured.
        """
        return False


@dataclass
class Trainer:
    """One learner process's share of the training of a policy.

    Attributes:
        version: optimizer steps done.
        callbacks: called at fixed places inside each batch.
        shadows: algorithms that are measured beside the one in use.
    """

    networks: Networks
    schedule: Schedule
    objective: Objective
    settings: TrainerSettings
    ranks: Ranks = field(default_factory=Ranks)
    version: int = 0
    callbacks: Callbacks = field(default_factory=Callbacks)
    shadows: Sequence[Shadow] = ()
    clock: StepClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = StepClock(self.ranks.activity)
        self._cosine = GradientCosine() if self.settings.gradient_cosine else None

    @property
    def step(self) -> int:
        """Batches trained so far."""
        return self.version // self.settings.steps_per_batch

    @property
    def warming_up(self) -> bool:
        """Only the critic learns yet."""
        return self.networks.critic is not None and self.step < self.settings.num_critic_warmup_steps

    def train_batch(
        self, rows: Sequence[Trajectory], batch: Sequence[PlanRow], *, lag_policy: LagPolicy | None = None
    ) -> TrainedBatch:
        """Train on one batch.

        Args:
            rows: this rank's trajectories.
            batch: every trajectory of the batch, on any rank.
            lag_policy: how old tokens are treated; None treats all alike.
        Raises:
            ContentError: rows and batch disagree.
        """
        with self.clock.timed("pack"):
            plan = BatchPlan.from_batch(
                self.objective, rows, batch, version=self.version, ranks=self.ranks, lag_policy=lag_policy
            )
            minibatches = pack_minibatches(
                plan.rows, plan.batch, self.settings.max_tokens, self.ranks, bootstrap=self.objective.bootstraps,
                num_minibatches=self.settings.num_minibatches, places=plan.places, measured=plan.measured,
                share=self.networks.shares_prompts, max_measured_tokens=self.settings.max_inference_tokens,
            )
            statistics = StepStatistics(plan, self.ranks, self.shadows)
        self.callbacks.planned(plan, statistics)
        trained = self._update(plan, minibatches, statistics)
        frozen = self.callbacks.on_batch_trained(trained.measured, trained.result)
        self._advance(trained.result)
        controls = self.objective.regularizers.controls
        controls.record(trained.measured)
        # A step that changed nothing, or could not yet, says nothing of what a weight should become.
        if not trained.result.skipped and trained.result.lr > 0.0:
            controls.update(trained.measured, num_steps=self.step, frozen=frozen)
        return trained

    def with_wire_precision(self) -> AbstractContextManager[None]:
        """Inside, the policy holds the values that actors got, where the wire rounds them."""
        settings = self.settings
        return with_wire_precision(
            self.networks.policy, compute_dtype=settings.compute_dtype, wire_dtype=settings.wire_dtype
        )

    def _update(
        self, plan: BatchPlan, minibatches: list[list[MicroBatch]], statistics: StepStatistics
    ) -> TrainedBatch:
        """The optimizer steps of a batch, one after each minibatch of each epoch."""
        batch, passes = list(chain.from_iterable(minibatches)), minibatches * self.settings.num_epochs
        unsplit = [list(minibatch) for minibatch in minibatches]  # as they are scored, of which the critic has states
        networks, total, results, critic = self.networks, Meter(), [], None
        for number, minibatch in enumerate(passes):
            if number:
                statistics.begin_step(number)
            with self.with_wire_precision():  # the policy that is scored is the one that actors sample from
                if number == 0:  # for what all steps share: losses that must see the whole batch first, anchors
                    with self.clock.timed("score"):
                        plan = score_batch(
                            networks.policy, batch, plan, self.ranks, critic=networks.critic, frozen=networks.frozen,
                            passes=packed_passes(
                                plan.rows, self.settings.max_inference_tokens if self.objective.needs else None,
                                self.ranks, bootstrap=self.objective.bootstraps, places=plan.places,
                                share=networks.shares_prompts,
                            ),
                        )
                        statistics.scored(plan)
                plan = self._accumulate(plan, minibatch, statistics)
            if number == 0 and networks.critic is not None:
                with self.clock.timed("critic"):
                    critic = networks.critic.fit(unsplit, plan.critic_targets, step=self.step)
            with self.clock.timed("optimizer"):
                meter = statistics.finish()
                result = optimizer_step(
                    networks.policy, networks.optimizer, self.schedule, step=plan.version + number,
                    lr_scale=self.callbacks.lr_scale(meter), max_grad_norm=self.settings.max_grad_norm,
                    ranks=self.ranks, frozen=self.warming_up, cosine=self._cosine,
                )
            total.merge(meter.totals())
            results.append(result)
            if (meter.value("drift/k3") or 0.0) > self.settings.stop_kl and not result.skipped:
                break
            if number + 1 < len(passes) and not result.skipped:
                self.callbacks.stepped(plan.version + number + 1)
        left = len(passes) - len(results)
        if self.settings.stop_kl < math.inf:
            total.add("policy/num_steps_left_out", left)
        # Lags count in versions, so the version counts these steps, too.
        results += [replace(result, cosine=None, left_out=True)] * left
        return TrainedBatch(total, BatchResult(tuple(results)), statistics, critic)

    def _accumulate(self, plan: BatchPlan, minibatch: list[MicroBatch], statistics: StepStatistics) -> BatchPlan:
        """Add the gradients of a minibatch up; one that does not fit into memory is split, in `minibatch` and plan."""
        with self.clock.timed("forward_backward"):
            while (failed := self._passes(plan, minibatch, statistics)) is not None:
                at, cause = failed
                whole = minibatch[at]
                check_split(whole, cause, self.ranks, possible=can_restart(self.networks.policy))
                forget_passes(self.networks.policy)  # it may have failed amid its backward pass: all begin again
                minibatch[at : at + 1] = parts = halves(
                    whole, plan.rows, bootstrap=self.objective.bootstraps, share=self.networks.shares_prompts
                )
                plan = plan.cut(whole, parts)
                statistics.split(plan)
                log.warning("a micro-batch of %d tokens did not fit into memory and is split: %s (%s)",
                            whole.num_tokens, REMEDY, cause)
        return plan

    def _passes(
        self, plan: BatchPlan, minibatch: Sequence[MicroBatch], statistics: StepStatistics
    ) -> tuple[int, str] | None:
        """The passes of a minibatch; the place of a micro-batch that memory did not suffice for, and the error."""
        policy, once = self.networks.policy, self.settings.reduce_once and self.ranks.mesh.world > 1
        last = max((at for at, one in enumerate(minibatch) if one.has_gradient), default=0)
        for at, micro_batch in enumerate(minibatch):
            reduce_gradients(policy, at == last or not once)
            try:
                forward_backward(policy, micro_batch, plan, statistics, self.ranks)
            except torch.OutOfMemoryError as error:  # which holds the tensors of the pass: it ends here
                return at, str(error).split(". ")[0]
            self.callbacks.queued()
        return None

    def _advance(self, result: BatchResult) -> None:
        """The version goes up by the batch's optimizer steps, unless none of them had finite gradients."""
        if result.skipped:
            return
        self.version += len(result.steps)
        networks, settings = self.networks, self.settings
        if networks.proximal is not None:
            networks.proximal.blend(networks.policy, decay=settings.ewma_decay)
        sync_if_due(networks.reference, networks.policy, every=settings.sync_reference_every, step=self.step)


def forward_backward(
    policy: Policy, micro_batch: MicroBatch, plan: BatchPlan, statistics: StepStatistics, ranks: Ranks
) -> Tensor:
    """Add the gradients, if it has any, of one micro-batch, which is measured; its share of the loss, 0-d.

    Nothing is read from the device: a GPU would run dry while it is waited for.

    The loss is normalized by counts of the whole batch, so gradients of micro-batches and ranks simply add up. FSDP2
    divides their sum over data-parallel ranks by the number of these; the loss is multiplied by it, which cancels.
    """
    batch = micro_batch.to(ranks.device)
    with torch.set_grad_enabled(batch.has_gradient):
        logprobs, entropy = policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures,
            sets=batch.sets,
        )
        loss = micro_batch_loss(
            batch, logprobs, entropy, plan, version=statistics.version, note=statistics.note
        )
    if batch.has_gradient:
        (loss * ranks.mesh.dp_size).backward()
    else:
        reshard(policy)  # no backward pass will free the gathered root, whose gradients would be lost with it
    return loss.detach()
