"""The critic: values of states, learned beside the policy with an optimizer and a gradient clip of its own.

Built only when the estimator needs values. `head` is a small network on the policy's last hidden states and leaves the
policy untouched; `model` is a transformer of its own that starts from a checkpoint. For `retrace_q` the output also
holds an advantage for every token of the vocabulary (a dueling head).

    ValueHead          hidden states of the policy -> values               (critic.kind=head)
    CriticModel        packed tokens -> its own transformer -> ValueHead   (critic.kind=model)
    look(batch, ...)   values before the update, for the estimator; remembers what fitting needs
    fit(batches, ...)  some optimizer steps toward the estimator's targets

The network learns targets of mean 0 and variance 1 (PopArt, arXiv:1602.07714): a value is `mean + scale * output`, with
the running moments of the targets. When they move, the last layer is rescaled so that no value does. Before the first
batch every output is 0, so its mean is simply where values start.

Legend: S trajectories of a micro-batch, A most action tokens of one, M scored tokens, E states after a truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from learner.checkpoint.model_files import ModelFiles
from learner.checkpoint.shards import ShardReader, read_training_tensors, reshard, training_tensors
from learner.data.layout import PackedLayout
from learner.data.packing import MicroBatch
from learner.data.transfer import on_host
from learner.model.attention.packed import decoder_of, packed_states, registered
from learner.model.gradients import optimizer_step
from learner.model.optimizer import Schedule, make_optimizer, make_schedule
from learner.model.policy import Inspected, Policy, load_policy, shard
from learner.ranks.mesh import Ranks
from streamrl.algorithms import dueling_q, find_estimator, value_loss
from streamrl.config.schema import CriticAvgLevel, CriticConfig, CriticKind
from streamrl.errors import CheckpointError, ConfigError

_MOMENT_DECAY = 0.99
"""Of the running moments of targets, a batch: they must follow a policy that learns, and outlast a batch."""
_SMALLEST_SCALE = 1e-2
"""Of targets that are all but equal, as those of a solved task: noise between them must not become a signal."""


@dataclass(frozen=True, slots=True)
class CriticResult:
    """The result of fitting the critic to one batch.

    Explained variance is `1 - Var(G - V) / Var(G)`, with the values V that the advantages were made from.
    """

    loss: float  # mean value loss of the first pass, reward units squared
    explained_variance: float  # G the targets
    return_explained_variance: float  # G the recorded returns: what V-trace cuts off does not flatter the critic
    value_error: float  # mean (G - V)^2
    return_variance: float  # Var(G) of the recorded returns
    clip_fraction: float  # of tokens and passes: V further than `clip` from where it stood
    grad_norm: float  # of the last step, before clipping
    lr: float


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Targets of the critic on one micro-batch; [S, A]."""

    targets: Tensor
    trained: Tensor  # bool
    old: Tensor  # values when the targets were made
    returns: Tensor  # discounted sums of the recorded rewards


class Critic:
    """Values for one run.

    Args:
        module: maps hidden states or packed tokens to [K, 1], or [K, 1 + vocabulary] for action values.
        last: its last layer.
        reads_policy: it reads the policy's hidden states.
        of_actions: it gives action advantages too.
        clip: bound on how far a value may move from its old one within the loss; None is off.
        num_steps: passes over the batch, one optimizer step each.
        by_minibatch: a step for each of the policy's minibatches in every pass.
        loss_factor: of the squared error.
        by_trajectory: the loss is a mean over trajectories of means over their tokens, not over all tokens.
        moments: decayed sums of 1, targets and their squares; float64.
    """

    def __init__(
        self, module: nn.Module, last: nn.Linear, optimizer: torch.optim.Optimizer, schedule: Schedule, *, ranks: Ranks,
        reads_policy: bool, of_actions: bool, clip: float | None, num_steps: int, max_grad_norm: float,
        moments: Tensor, by_minibatch: bool = False, loss_factor: float = 0.5, by_trajectory: bool = False,
    ) -> None:
        self.module, self.optimizer, self._last, self.moments = module, optimizer, last, moments
        self.reads_policy, self.of_actions = reads_policy, of_actions
        self._schedule, self._ranks = schedule, ranks
        self._clip, self._num_steps, self._max_grad_norm = clip, num_steps, max_grad_norm
        self._by_minibatch, self._loss_factor, self._by_trajectory = by_minibatch, loss_factor, by_trajectory
        self._seen: dict[tuple[int, ...], Inspected | None] = {}
        self._num_clipped = torch.zeros(())

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
        self, minibatches: Sequence[Sequence[MicroBatch]], targets_of: Callable[[MicroBatch], Targets], *, step: int
    ) -> CriticResult:
        """Move the values toward their targets; a collective call. Forgets the passes that `look` remembered.

        The schedule is that of `step`, the batches trained before.
        """
        parts = [[batch.to(self._ranks.device) for batch in minibatch] for minibatch in minibatches]
        batches = list(chain.from_iterable(parts))
        goals = [
            [goal for batch in part if batch.trajectory_ids for goal in on_host(targets_of(batch))] for part in parts
        ]
        count, size, moments, explained = self._before(list(chain.from_iterable(goals)))
        start = self._normalize(moments)
        counted = [(batches, size)]
        if self._by_minibatch:
            counted = [(part, self._before(own)[1]) for part, own in zip(parts, goals, strict=True)]
        first_loss, self._num_clipped = 0.0, torch.zeros((), device=self._ranks.device)
        for turn in range(self._num_steps):
            for part, part_size in counted:
                total = sum(self._backward(batch, targets_of, part_size, start) for batch in part)
                if turn == 0:
                    first_loss += self._ranks.all_reduce([float(total)])[0] * (part_size / size)
                result = optimizer_step(
                    self.module, self.optimizer, self._schedule, step=step, max_grad_norm=self._max_grad_norm,
                    ranks=self._ranks,
                )
        self._seen.clear()
        clipped = self._ranks.all_reduce([float(self._num_clipped)])[0] / (count * self._num_steps)
        return CriticResult(first_loss, *explained, clipped, result.grad_norm, result.lr)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, sharded tensor) of weights and moments, for a checkpoint."""
        also = [("targets", self.moments)]
        return ((f"critic/{key}", tensor) for key, tensor in training_tensors(self.module, self.optimizer, also))

    def restore(self, shards: ShardReader) -> bool:
        """Take weights and moments out of a checkpoint; False if it holds no critic.

        Raises CheckpointError: a critic of another kind or size.
        """
        if not shards.has("critic/"):
            return False
        try:
            read_training_tensors(shards, self.module, self.optimizer, "critic/")
        except CheckpointError as error:
            raise CheckpointError(
                f"the run's critic is another one than the settings make ({error}): leave critic.kind, "
                "critic.model_path and whether advantage.estimator is retrace_q as they were, or start a new run"
            ) from error
        if shards.has("critic/targets"):
            self.moments = shards.read_whole("critic/targets")
        else:  # of an older version, whose outputs were the values
            self.moments = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
        return True

    @property
    def _normal(self) -> tuple[float, float]:
        """Mean and scale of the targets so far."""
        weight, total, squares = self.moments.tolist()
        if weight == 0.0:
            return 0.0, 1.0
        mean = total / weight
        return mean, max(squares / weight - mean**2, _SMALLEST_SCALE**2) ** 0.5

    @torch.no_grad()
    def _normalize(self, moments: Tensor) -> float:
        """Take a batch's moments in and leave every value where it is; before the first batch they all become its mean.

        Returns:
            how far values moved.
        """
        if not moments.isfinite().all():
            return 0.0
        (mean, scale), first = self._normal, not self.moments.any()
        self.moments = _MOMENT_DECAY * self.moments + (1.0 - _MOMENT_DECAY) * moments
        new_mean, new_scale = self._normal
        if first:
            return new_mean
        reshard(self.module)
        self._last.weight.mul_(scale / new_scale)
        # All outputs alike: a constant on every action's advantage cancels in the dueling head.
        self._last.bias.mul_(scale / new_scale).add_((mean - new_mean) / new_scale)
        return 0.0

    def _backward(
        self, batch: MicroBatch, targets_of: Callable[[MicroBatch], Targets], size: float, start: float
    ) -> Tensor:
        """Add the gradients of one micro-batch up; its loss, which is not read yet."""
        out = self._outputs(batch)
        if not batch.trajectory_ids:
            loss = out.sum() * 0.0  # connected to every parameter: the backward collectives must run
        else:
            goal = targets_of(batch)
            values = batch.padded(self._values(batch, out)[1])
            old = None if self._clip is None else goal.old + start
            losses = value_loss(values, goal.targets, goal.trained, old_values=old, clip=self._clip)
            losses = losses * (2.0 * self._loss_factor)
            if self._by_trajectory:
                losses = losses / goal.trained.sum(1, keepdim=True).clamp(min=1)
            loss = losses.sum() / size
            if self._clip is not None:
                self._num_clipped += (((values - old).abs() > self._clip) & goal.trained).sum()
        # In units of the normalized targets: rate, epsilon and gradient clip then mean the same for all rewards.
        (loss * (self._ranks.mesh.dp_size / self._normal[1] ** 2)).backward()
        return loss.detach().double()

    def _outputs(self, batch: MicroBatch) -> Tensor:
        """[M + E, 1 or 1 + V] in float32, in units of the rewards."""
        if self.reads_policy:
            seen = self._seen[batch.trajectory_ids]
            assert seen is not None, "a value head needs the policy's hidden states"
            out = self.module(seen.states)
        else:
            out = self.module(batch.tokens, batch.positions, batch.packing, batch.state_index)
        mean, scale = self._normal
        return mean + scale * out.float()

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

    def _before(self, goals: Sequence[Targets]) -> tuple[float, float, Tensor, tuple[float, float, float, float]]:
        """Trained tokens of all ranks, and what losses are divided by (at least 1 each); 1, mean and mean square of the
        targets; measures of the values."""
        own_count, own_rows, sums = 0, 0, torch.zeros(4, 2, dtype=torch.float64)
        for goal in goals:
            targets, returns, old = (x[goal.trained].double() for x in (goal.targets, goal.returns, goal.old))
            own_count += old.numel()
            own_rows += int(goal.trained.any(1).sum())
            each = torch.stack([targets, targets - old, returns, returns - old])
            sums += torch.stack([each.sum(1), each.square().sum(1)], dim=1)
        count, rows, *totals = self._ranks.all_reduce([float(own_count), float(own_rows), *sums.flatten().tolist()])
        means = (torch.tensor(totals, dtype=torch.float64) / max(count, 1.0)).reshape(4, 2)
        spread, missed, return_spread, return_missed = (square - mean**2 for mean, square in means.tolist())
        moments = torch.tensor([min(count, 1.0), *means[0]], dtype=torch.float64)
        explained = _explained(missed, spread), _explained(return_missed, return_spread)
        size = rows if self._by_trajectory else count
        return max(count, 1.0), max(size, 1.0), moments, (*explained, float(means[1, 1]), return_spread)


def _explained(missed: float, spread: float) -> float:
    return 1.0 - missed / spread if spread > 1e-12 else 0.0


_LARGEST_ACTION_HEAD = 4096
VALUE_HEAD = "value_head.safetensors"
"""In the folder of a critic: its value head, and as `targets` the moments of what it learned."""


class ValueHead(nn.Module):
    """Two layers on normalized hidden states, or of a critic that starts at a reward model that one's single layer.

    The last layer starts at 0, so that all values begin alike.
    """

    shares_prompts = True  # it reads the policy's states

    def __init__(self, hidden_size: int, num_outputs: int = 1, *, single_layer: bool = False) -> None:
        super().__init__()
        self.norm = None if single_layer else nn.LayerNorm(hidden_size)
        self.inner = None if single_layer else nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, num_outputs)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    @property
    def output_layer(self) -> nn.Module:
        return self.outer

    def forward(self, states: Tensor) -> Tensor:
        """[K, H] to [K, num_outputs]."""
        states = states.to(self.outer.weight.dtype)
        if self.norm is not None and self.inner is not None:
            states = nn.functional.silu(self.inner(self.norm(states)))
        return self.outer(states)


class CriticModel(nn.Module):
    """A decoder of its own with a value head on it."""

    def __init__(self, decoder: nn.Module, head: ValueHead, *, shares_prompts: bool = False) -> None:
        """`shares_prompts`: as of a `Policy`."""
        super().__init__()
        self.decoder = decoder
        self.head = head
        self.shares_prompts = shares_prompts

    def forward(self, tokens: Tensor, positions: Tensor, packing: PackedLayout, state_index: Tensor) -> Tensor:
        """Values of the states at `state_index` [K] of the packed row [N]; [K, num_outputs]."""
        hidden = packed_states(self.decoder, tokens, positions, packing)
        return self.head(hidden.index_select(0, state_index))


def saved_head(config: CriticConfig) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of the value head that critic.model_path holds, none without one, and the moments of its targets.

    A reward model's scores are values of mean 0 and scale 1. Raises ConfigError: a critic of the other kind, or none.
    """
    nothing_seen = torch.zeros(3, dtype=torch.float64)
    if config.model_path is None:
        return {}, nothing_seen
    folder = Path(config.model_path)
    if (folder / VALUE_HEAD).is_file():
        trained = "model" if any(path.name != VALUE_HEAD for path in folder.glob("*.safetensors")) else "head"
        if trained != config.kind.name:
            raise ConfigError(f"critic.model_path={folder} was trained with critic.kind={trained}: set it so")
        tensors = load_file(folder / VALUE_HEAD)
        return tensors, tensors.pop("targets")
    if config.kind is CriticKind.head:
        raise ConfigError(
            f"critic.model_path={folder} holds no {VALUE_HEAD}, and critic.kind=head reads nothing else: give "
            "RUN/critic of another run, or set critic.kind=model"
        )
    score = ModelFiles(folder).tensor("score.weight")
    if score is None:
        return {}, nothing_seen
    one_batch = torch.tensor([0.01, 0.0, 0.01], dtype=torch.float64)  # their weight: soon they are those of the run
    return {"outer.weight": score.float(), "outer.bias": torch.zeros(len(score))}, one_batch


def make_head(tensors: Mapping[str, Tensor], hidden_size: int, num_outputs: int) -> ValueHead:
    """A value head with the tensors of a saved one, or a new one without. Raises ConfigError: another size."""
    head = ValueHead(hidden_size, num_outputs, single_layer=bool(tensors) and "inner.weight" not in tensors)
    if tensors:
        size = tuple(tensors["outer.weight"].shape)
        if size != tuple(head.outer.weight.shape):
            raise ConfigError(
                f"critic.model_path has a value head of {size[0]} outputs for states of size {size[1]}; this critic "
                f"needs {num_outputs} for {hidden_size}: take that of a run with this policy and estimator"
            )
        head.load_state_dict(dict(tensors))
    return head


def build_critic(
    config: CriticConfig, estimator: str, policy: Policy, model_dir: Path, *, num_steps: int, dtype: torch.dtype,
    ranks: Ranks, max_tokens: int | None = None,
) -> Critic:
    """The critic that the settings describe.

    Args:
        estimator: name; one that reads action values (`retrace_q`) makes it a critic of these.
        model_dir: the policy's first checkpoint; a critic model starts there unless critic.model_path is set, which
            may also be a critic or a reward model, whose head it then starts with.
        num_steps: of the run, for the schedule.
        max_tokens: of the run's longest sequence; see `load_policy`.
    Raises:
        ConfigError: action values over a large vocabulary, or action values without the policy's states.
    """
    of_actions = find_estimator(estimator).of_actions
    vocabulary = policy.vocab_size
    if of_actions and vocabulary > _LARGEST_ACTION_HEAD:
        raise ConfigError(
            f"advantage.estimator={estimator!r} gives every token of the vocabulary a value; with {vocabulary} tokens "
            f"(most {_LARGEST_ACTION_HEAD}) that head would be larger than the model: use retrace_v or vtrace."
        )
    if of_actions and config.kind is not CriticKind.head:
        raise ConfigError(f"advantage.estimator={estimator!r} reads the policy's distribution: set critic.kind=head.")
    outputs = 1 + vocabulary if of_actions else 1
    tensors, moments = saved_head(config)
    if config.kind is CriticKind.head:
        head = make_head(tensors, policy.hidden_size, outputs)
        module: nn.Module = shard(head, [], ranks, torch.float32)
    else:
        module = _critic_model(
            Path(config.model_path or model_dir), lambda size: make_head(tensors, size, outputs), policy, ranks, dtype,
            max_tokens=max_tokens,
        )
        head = module.head
    _freeze(module, config)
    return Critic(
        module, head.outer, make_optimizer(module, config.optimizer, setting="critic.optimizer"),
        make_schedule(config.optimizer, config.scheduler, num_steps=num_steps, setting="critic.scheduler"),
        ranks=ranks, reads_policy=config.kind is CriticKind.head, of_actions=of_actions, clip=config.clip,
        num_steps=config.num_steps, max_grad_norm=config.optimizer.max_grad_norm, moments=moments,
        by_minibatch=config.by_minibatch, loss_factor=config.loss_factor,
        by_trajectory=config.avg_level is CriticAvgLevel.sequence,
    )


def _freeze(module: nn.Module, config: CriticConfig) -> None:
    """Leave the parameters that critic.frozen names out of training. Raises ConfigError: a name of none, or of all."""
    if config.frozen and config.kind is CriticKind.head:
        raise ConfigError(f"critic.frozen={config.frozen} is for critic.kind=model: set that too, or freeze none")
    names = [name for name, _ in module.named_parameters()]
    for part in config.frozen:
        if not any(part in name for name in names):
            known = sorted({piece for name in names for piece in name.split(".")[:-1] if not piece.isdigit()})
            raise ConfigError(f"critic.frozen: no parameter is called {part!r}; name one of {', '.join(known)}.")
    for name, parameter in module.named_parameters():
        if any(part in name for part in config.frozen):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"critic.frozen={config.frozen} leaves nothing to train: leave something out.")


def _critic_model(
    model_dir: Path, head_of: Callable[[int], ValueHead], policy: Policy, ranks: Ranks, dtype: torch.dtype, *,
    max_tokens: int | None,
) -> CriticModel:
    """The decoder of a checkpoint, of which each rank reads the rows of its shards, with a value head on it."""
    made: list[CriticModel] = []

    def around(start: Policy) -> CriticModel:
        start.model.set_attn_implementation(registered(policy.attention))
        made.append(CriticModel(
            decoder_of(start.model), head_of(start.hidden_size), shares_prompts=start.shares_prompts
        ))
        return made[0]

    # Without a mesh nothing is sharded, and the type of a policy's passes would be refused.
    start = load_policy(
        model_dir, max_tokens=max_tokens, share_prompts=policy.shares_prompts, ranks=ranks, around=around,
        dtype=dtype if ranks.fsdp_mesh is not None else torch.float32,
    )
    return made[0] if made else around(start)
