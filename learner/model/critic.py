"""The critic: values of states, learned beside the policy with an optimizer and a gradient clip of its own.

Built only when the estimator needs values. `head` is a small network on the policy's last hidden states and leaves the
policy untouched; `model` is a transformer of its own that starts from a checkpoint. For `retrace_q` the output also
holds an advantage for every token of the vocabulary (a dueling head).

    look(batch, ...)   values before the update, for the estimator; remembers what fitting needs
    fit(batches, ...)  some optimizer steps toward the estimator's targets

Legend: S trajectories of a micro-batch, A most action tokens of one, M scored tokens, E states after a truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from learner.checkpoint.shards import ShardReader, read_training_tensors, training_tensors
from learner.data.packing import MicroBatch
from learner.model.gradients import optimizer_step
from learner.model.optimizer import Schedule
from learner.ranks.mesh import Ranks
from streamrl.algorithms import dueling_q, value_loss

if TYPE_CHECKING:
    from learner.model.policy import Inspected  # loads transformers, which the dry run does without


@dataclass(frozen=True, slots=True)
class CriticResult:
    """The result of fitting the critic to one batch."""

    loss: float  # mean value loss of the first pass, reward units squared
    explained_variance: float  # 1 - Var(G - V) / Var(G) of the values that the advantages were made from
    grad_norm: float  # of the last step, before clipping


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Targets of the critic on one micro-batch; [S, A]."""

    targets: Tensor
    trained: Tensor  # bool
    old: Tensor  # values when the targets were made


class Critic:
    """Values for one run.

    Args:
        module: maps hidden states or packed tokens to [K, 1], or [K, 1 + vocabulary] for action values.
        reads_policy: it reads the policy's hidden states.
        of_actions: it gives action advantages too.
        clip: bound on how far a value may move from its old one within the loss; None is off.
        num_steps: passes over the batch, one optimizer step each.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, *, ranks: Ranks,
        reads_policy: bool, of_actions: bool, clip: float | None, num_steps: int, max_grad_norm: float,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.reads_policy, self.of_actions = reads_policy, of_actions
        self._schedule, self._ranks = schedule, ranks
        self._clip, self._num_steps, self._max_grad_norm = clip, num_steps, max_grad_norm
        self._seen: dict[tuple[int, ...], Inspected | None] = {}

    @torch.no_grad()
    def look(self, batch: MicroBatch, seen: Inspected | None) -> dict[str, Tensor | None]:
        """Values [S, A] and bootstrap [S] (and action values [S, A]) of a micro-batch; `seen` is the policy's pass."""
        self._seen[batch.trajectory_ids] = seen
        out = self._outputs(batch)
        ends = torch.zeros(batch.mask.shape[0], device=out.device)
        ends[batch.bootstrap_rows] = out[batch.num_scored :, 0]
        values, actions = self._values(batch, out)
        found = batch.padded(actions) if self.of_actions else None
        return {"values": batch.padded(values), "bootstrap": ends, "action_values": found}

    def fit(
        self, micro_batches: Sequence[MicroBatch], targets_of: Callable[[MicroBatch], Targets], *, step: int
    ) -> CriticResult:
        """Move the values toward their targets; a collective call. Forgets what `look` remembered.

        The schedule is that of `step`, the batches trained before.
        """
        batches = [batch.to(self._ranks.device) for batch in micro_batches]
        count, explained = self._before(batches, targets_of)
        first_loss = norm = 0.0
        for turn in range(self._num_steps):
            total = sum(self._backward(batch, targets_of, count) for batch in batches)
            if turn == 0:
                first_loss = self._ranks.all_reduce([float(total)])[0]
            result = optimizer_step(
                self.module, self.optimizer, self._schedule, step=step, max_grad_norm=self._max_grad_norm,
                ranks=self._ranks,
            )
            norm = result.grad_norm
        self._seen.clear()
        return CriticResult(first_loss, explained, norm)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, sharded tensor) of weights and moments, for a checkpoint."""
        return ((f"critic/{key}", tensor) for key, tensor in training_tensors(self.module, self.optimizer))

    def restore(self, shards: ShardReader) -> bool:
        """Take weights and moments out of a checkpoint; False if it holds no critic.

        Raises CheckpointError: a critic of another kind or size.
        """
        if not shards.has("critic/"):
            return False
        read_training_tensors(shards, self.module, self.optimizer, "critic/")
        return True

    def _backward(self, batch: MicroBatch, targets_of: Callable[[MicroBatch], Targets], count: float) -> float:
        out = self._outputs(batch)
        if not batch.trajectory_ids:
            loss = out.sum() * 0.0  # connected to every parameter: the backward collectives must run
        else:
            values, actions = self._values(batch, out)
            goal = targets_of(batch)
            losses = value_loss(
                batch.padded(actions if self.of_actions else values), goal.targets, goal.trained,
                old_values=None if self._clip is None else goal.old, clip=self._clip,
            )
            loss = losses.sum() / count
        (loss * self._ranks.mesh.dp_size).backward()
        return float(loss.detach())

    def _outputs(self, batch: MicroBatch) -> Tensor:
        """[M + E, 1 or 1 + V] in float32."""
        if self.reads_policy:
            seen = self._seen[batch.trajectory_ids]
            assert seen is not None, "a value head needs the policy's hidden states"
            return self.module(seen.states).float()
        return self.module(batch.tokens, batch.positions, batch.packing, batch.state_index).float()

    def _values(self, batch: MicroBatch, out: Tensor) -> tuple[Tensor, Tensor]:
        """State values and values of the actions taken, [M] each; the same if there are no action values."""
        values = out[: batch.num_scored, 0]
        if not self.of_actions:
            return values, values
        seen = self._seen[batch.trajectory_ids]
        assert seen is not None and seen.all_logprobs is not None, "action values need the policy's distribution"
        advantages = out[None, : batch.num_scored, 1:]
        actions, _ = dueling_q(values[None], advantages, seen.all_logprobs[None], batch.targets[None])
        return values, actions[0]

    def _before(
        self, batches: Sequence[MicroBatch], targets_of: Callable[[MicroBatch], Targets]
    ) -> tuple[float, float]:
        """Trained tokens of all ranks (at least 1), and the explained variance of the old values."""
        sums = torch.zeros(5, dtype=torch.float64)
        for batch in batches:
            if batch.trajectory_ids:
                targets = targets_of(batch)
                goal = targets.targets[targets.trained].double()
                error = goal - targets.old[targets.trained].double()
                size = goal.new_tensor(goal.numel())
                sums += torch.stack([size, goal.sum(), goal.square().sum(), error.sum(), error.square().sum()]).cpu()
        count, goal, goal_squares, error, error_squares = self._ranks.all_reduce(sums.tolist())
        count = max(count, 1.0)
        spread = goal_squares / count - (goal / count) ** 2
        missed = error_squares / count - (error / count) ** 2
        return count, 1.0 - missed / spread if spread > 1e-12 else 0.0

