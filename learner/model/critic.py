"""The critic: values of states, learned beside the policy with an optimizer and a gradient clip of its own.

Built only when the estimator needs values. `head` puts a small network on the policy's last hidden states and leaves
the policy untouched: nothing is run twice. `model` is a whole transformer of its own that starts from a checkpoint.
For `retrace_q` the output also holds an advantage for every word of the vocabulary (a dueling head).

    look(batch, ...)   values before the update, for the estimator; remembers what fitting needs
    fit(batches, ...)  some optimizer steps toward the estimator's targets

Legend: S trajectories of a micro-batch, A most action tokens of one, M scored tokens, E states after a truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from learner.checkpoint.shards import ShardReader, read_training_tensors, training_tensors
from learner.data.packing import MicroBatch
from learner.mesh import Ranks
from learner.model.gradients import optimizer_step
from learner.model.optimizer import Schedule
from learner.model.policy import Inspected
from streamrl.algorithms import dueling_q, value_loss


@dataclass(frozen=True, slots=True)
class CriticResult:
    """What fitting on one batch did.

    Attributes:
        loss: mean value loss of the first pass, reward units squared.
        explained_variance: `1 - Var(G - V) / Var(G)` of the values that the advantages were made from.
        grad_norm: of the last step, before clipping.
    """

    loss: float
    explained_variance: float
    grad_norm: float


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """What one micro-batch teaches the critic; [S, A]."""

    targets: Tensor
    trained: Tensor  # bool
    old: Tensor  # values when the targets were made


@dataclass(slots=True, eq=False)
class _Memory:
    states: Tensor | None  # [M + E, H] hidden states of the policy
    all_logprobs: Tensor | None  # [M, V] of the policy, for action values


class Critic:
    """Values for one run.

    Args:
        module: maps states to [K, 1], or [K, 1 + vocabulary] for action values; of hidden states, or of packed tokens.
        reads_policy: the module's states are the policy's hidden states.
        of_actions: the module tells action advantages too.
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
        self._memory: dict[tuple[int, ...], _Memory] = {}

    @torch.no_grad()
    def look(self, batch: MicroBatch, seen: Inspected | None) -> dict[str, Tensor | None]:
        """Values [S, A] and bootstrap [S] (and action values [S, A]) of a micro-batch; `seen` is the policy's pass."""
        memory = _Memory(seen.states if seen else None, seen.all_logprobs if seen else None)
        self._memory[batch.trajectory_ids] = memory
        out = self._outputs(batch, memory)
        num = batch.num_scored
        ends = torch.zeros(batch.mask.shape[0], device=out.device)
        ends[batch.bootstrap_rows] = out[num:, 0]
        values, actions = self._values(batch, memory, out)
        return {
            "values": batch.padded(values), "bootstrap": ends,
            "action_values": batch.padded(actions) if self.of_actions else None,
        }

    def fit(
        self, micro_batches: Sequence[MicroBatch], targets_of: Callable[[MicroBatch], Targets], *, step: int
    ) -> CriticResult:
        """Move the values toward their targets; a collective call. Forgets what `look` remembered.

        Args:
            targets_of: what each micro-batch teaches; asked once per micro-batch and pass.
            step: the policy's version, for the schedule.
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
        self._memory.clear()
        return CriticResult(first_loss, explained, norm)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, sharded tensor) of weights and moments, for a checkpoint."""
        return ((f"critic/{key}", tensor) for key, tensor in training_tensors(self.module, self.optimizer))

    def restore(self, shards: ShardReader) -> bool:
        """Take weights and moments out of a checkpoint; False if it holds no critic.

        Raises:
            CheckpointError: a critic of another kind or size.
        """
        if not any(key.startswith("critic/") for key in shards.keys()):  # noqa: SIM118
            return False
        read_training_tensors(shards, self.module, self.optimizer, "critic/")
        return True

    def _backward(
        self, batch: MicroBatch, targets_of: Callable[[MicroBatch], Targets], count: float
    ) -> float:
        memory = self._memory[batch.trajectory_ids]
        out = self._outputs(batch, memory)
        if not batch.trajectory_ids:
            loss = out.sum() * 0.0  # connected to every parameter: the backward collectives must run
        else:
            values, actions = self._values(batch, memory, out)
            taught = targets_of(batch)
            losses = value_loss(
                batch.padded(actions if self.of_actions else values), taught.targets, taught.trained,
                old_values=None if self._clip is None else taught.old, clip=self._clip,
            )
            loss = losses.sum() / count
        (loss * self._ranks.dp_size).backward()
        return float(loss.detach())

    def _outputs(self, batch: MicroBatch, memory: _Memory) -> Tensor:
        """[M + E, 1 or 1 + V] in float32."""
        if self.reads_policy:
            return self.module(memory.states).float()
        return self.module(batch.tokens, batch.positions, batch.packing, batch.state_index).float()

    def _values(self, batch: MicroBatch, memory: _Memory, out: Tensor) -> tuple[Tensor, Tensor]:
        """State values and values of the actions taken, [M] each; the same if there are no action values."""
        values = out[: batch.num_scored, 0]
        if not self.of_actions:
            return values, values
        assert memory.all_logprobs is not None, "action values need the policy's whole distribution"
        actions, _ = dueling_q(
            values[None], out[None, : batch.num_scored, 1:], memory.all_logprobs[None], batch.targets[None]
        )
        return values, actions[0]

    def _before(
        self, batches: Sequence[MicroBatch], targets_of: Callable[[MicroBatch], Targets]
    ) -> tuple[float, float]:
        """Trained tokens of all ranks (at least 1), and the explained variance of the old values."""
        sums = torch.zeros(5, dtype=torch.float64)
        for batch in batches:
            if batch.trajectory_ids:
                taught = targets_of(batch)
                goal = taught.targets[taught.trained].double()
                error = goal - taught.old[taught.trained].double()
                sums += torch.stack(
                    [torch.tensor(float(goal.numel()), dtype=torch.float64), goal.sum().cpu(),
                     goal.square().sum().cpu(), error.sum().cpu(), error.square().sum().cpu()]
                )
        count, goal, goal_squares, error, error_squares = self._ranks.all_reduce(sums.tolist())
        count = max(count, 1.0)
        spread = goal_squares / count - (goal / count) ** 2
        missed = error_squares / count - (error / count) ** 2
        return count, 1.0 - missed / spread if spread > 1e-12 else 0.0

