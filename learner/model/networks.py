"""The networks of a run: the policy, and with it those that the estimator, the loss and the KL term need.

A `FrozenPolicy` is a copy that is never trained: the reference of a KL term, or a slowly moving proximal anchor. It is
built by the same `load_policy` call as the policy, so FSDP2 shards both alike: `sync` and `blend` work on local shards
without communication. A copy that has moved away from its files is saved with the checkpoint, under
`frozen/<name>/<parameter>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learner.checkpoint.shards import ShardReader, reshard, training_tensors
from learner.data.packing import MicroBatch
from learner.model.critic import Critic
from learner.model.policy import Policy, load_policy
from learner.ranks.mesh import Ranks, local_part
from streamrl.architectures.saved_buffers import saved_buffers, saved_tensors
from streamrl.config.schema import ReferenceConfig
from streamrl.errors import ConfigError


class FrozenPolicy:
    """Weights that only `sync`, `blend` and `restore` change.

    Args:
        policy: used by this copy alone; its gradients are switched off here.
        name: letters and digits; tells this copy from others in a checkpoint.
    """

    def __init__(self, policy: Policy, *, name: str) -> None:
        self.name = name
        self._policy = policy.requires_grad_(False).eval()

    @property
    def shares_prompts(self) -> bool:
        """Whether this model may score sequences whose common beginning is packed once."""
        return self._policy.shares_prompts

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> Tensor:
        """Log-prob of each scored token at its own temperature, [M], nats, float32, detached; a collective call."""
        logprobs, _ = self._policy(
            batch.tokens, batch.positions, batch.packing, batch.score_index, batch.targets, batch.temperatures,
            sets=batch.sets,
        )
        reshard(self._policy)  # no backward pass will free the gathered root
        return logprobs

    def check_same_vocabulary(self, policy: Policy) -> None:
        """Raise ConfigError unless `policy` has as many tokens."""
        if self._policy.vocab_size != policy.vocab_size:
            raise ConfigError(
                f"the {self.name} model has {self._policy.vocab_size} tokens and the policy has {policy.vocab_size}: "
                "log-probs of the same tokens are compared, so both need one tokenizer."
            )

    def check_same_parameters(self, source: nn.Module) -> None:
        """Raise ConfigError unless `source` has the same parameters: found at the start, not at the first sync."""
        mine, theirs = ({name: tuple(p.shape) for name, p in m.named_parameters()} for m in (self._policy, source))
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if different:
            name = different[0]
            raise ConfigError(
                f"the {self.name} model cannot follow the policy: {name} is {mine.get(name)} there and "
                f"{theirs.get(name)} in the policy; use a checkpoint of the same architecture."
            )

    @torch.no_grad()
    def sync(self, source: nn.Module) -> None:
        """Take over the weights of `source`, a policy of the same architecture and sharding."""
        for mine, theirs in (*self._pairs(source), *_buffer_pairs(self._policy, source)):
            mine.copy_(theirs)

    @torch.no_grad()
    def blend(self, source: nn.Module, *, decay: float) -> None:
        """Exponential average: `w <- decay w + (1 - decay) w_source`."""
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} must lie in [0, 1]")
        pairs = list(self._pairs(source))
        torch._foreach_lerp_([mine for mine, _ in pairs], [theirs for _, theirs in pairs], 1.0 - decay)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, sharded tensor) of every parameter and saved buffer, for a checkpoint."""
        reshard(self._policy)
        for name, tensor in saved_tensors(self._policy):
            yield f"frozen/{self.name}/{name}", tensor.detach()

    def restore(self, shards: ShardReader) -> bool:
        """Take the weights of this name out of a checkpoint; False if it holds none.

        Raises CheckpointError: they belong to another model.
        """
        if not (there := shards.keys(f"frozen/{self.name}/")):
            return False
        own = {f"frozen/{self.name}/{name}" for name, _ in saved_buffers(self._policy)}
        for key, tensor in self.tensors():
            if key in there or key not in own:  # older checkpoints have no buffers
                shards.read_into(key, tensor)
        return True

    def _pairs(self, source: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's shards of both, parameter by parameter."""
        reshard(self._policy)
        reshard(source)
        theirs = dict(source.named_parameters())
        for name, parameter in self._policy.named_parameters():
            mine, other = local_part(parameter.detach()), local_part(theirs[name].detach())
            if mine.numel():
                yield mine, other


def _buffer_pairs(mine: nn.Module, source: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    theirs = dict(saved_buffers(source))
    return ((buffer, theirs[name]) for name, buffer in saved_buffers(mine))


def load_reference(
    settings: ReferenceConfig, start: Path, policy: Policy, ranks: Ranks, *, passes: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> FrozenPolicy:
    """The reference model of a KL term.

    Args:
        start: where the run's first weights are; the reference unless `reference.model_path` names another.
        passes: how it makes them, as `learner.model.policy.pass_options` says.
        policy: what it will be compared with, and perhaps follow.
    Raises:
        ConfigError: no such checkpoint, another vocabulary, or another architecture where it is to be synced.
    """
    path = settings.model_path or start
    try:
        # Its passes read `dtype`, and it never learns: float32 would be twice the memory for the same numbers.
        model = load_policy(path, dtype=dtype, masters=dtype, ranks=ranks, offload=settings.offload, **passes)
        reference = FrozenPolicy(model, name="reference")
        reference.check_same_vocabulary(policy)
    except ConfigError as error:
        raise ConfigError(f"reference.model_path={path}: {error}") from error
    if settings.sync_every_steps:
        reference.check_same_parameters(policy)
    return reference


def sync_if_due(reference: FrozenPolicy | None, policy: nn.Module, *, every: int, step: int) -> None:
    """Let the reference follow after every so many steps; 0 never."""
    if reference is not None and every and step % every == 0:
        reference.sync(policy)


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
