"""The networks of a run: the policy, and beside it what the estimator, the loss and the KL term ask for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from learner.checkpoint.checkpoint import Checkpoint
from learner.checkpoint.resume import ResumeState
from learner.mesh import Ranks
from learner.model.critic import Critic
from learner.model.critic_network import build_critic
from learner.model.optimizer import make_optimizer
from learner.model.paths import compute_dtype
from learner.model.policy import Policy, load_policy
from learner.model.reference import FrozenPolicy, load_reference
from streamrl.config.schema import Config

log = logging.getLogger("streamrl.learner")


@dataclass(frozen=True, slots=True)
class Networks:
    """What is trained and what it is compared with; None where nothing would read it."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: Critic | None
    reference: FrozenPolicy | None
    proximal: FrozenPolicy | None


def load_networks(config: Config, model_dir: Path, past: ResumeState, ranks: Ranks, *, with_critic: bool) -> Networks:
    """Every network as the starting model or the predecessor's checkpoint has it; a collective call."""
    dtype = compute_dtype(config.policy.dtype, ranks.device)
    policy = _load(config, model_dir, dtype, ranks)
    networks = Networks(
        policy=policy,
        optimizer=make_optimizer(policy, config.policy.optimizer),
        critic=_make_critic(config, policy, model_dir, dtype, ranks) if with_critic else None,
        reference=load_reference(config, model_dir, policy, ranks, dtype=dtype),
        proximal=_make_proximal(config, model_dir, dtype, ranks),
    )
    if past.checkpoint is not None:
        past.checkpoint.restore(policy, networks.optimizer, ranks)
        _restore_beside(past.checkpoint, networks, reference_moves=bool(config.reference.sync_every_steps))
    return networks


def _load(config: Config, model_dir: Path, dtype: torch.dtype, ranks: Ranks) -> Policy:
    return load_policy(
        model_dir, dtype=dtype, device=ranks.device, ranks=ranks, chunk_tokens=config.learner.logprob_chunk_tokens,
        gradient_checkpointing=config.policy.gradient_checkpointing,
    )


def _make_critic(config: Config, policy: Policy, model_dir: Path, dtype: torch.dtype, ranks: Ranks) -> Critic:
    return build_critic(
        config.critic, config.advantage.estimator, policy, model_dir, num_steps=config.trainer.num_steps, dtype=dtype,
        ranks=ranks,
    )


def _make_proximal(config: Config, model_dir: Path, dtype: torch.dtype, ranks: Ranks) -> FrozenPolicy | None:
    """The averaged policy that the loss is anchored at, if it is."""
    return FrozenPolicy(_load(config, model_dir, dtype, ranks), name="ewma") if config.loss.anchor == "ewma" else None


def _restore_beside(checkpoint: Checkpoint, networks: Networks, *, reference_moves: bool) -> None:
    """The networks beside the policy; a run that gained one since the checkpoint starts it afresh, and says so."""
    critic, proximal, reference = networks.critic, networks.proximal, networks.reference
    if critic is not None and not critic.restore(checkpoint.shards()):
        log.warning("%s holds no critic: it starts untrained", checkpoint.path.name)
    if proximal is not None and not proximal.restore(checkpoint.shards()):
        log.warning("%s holds no averaged policy: the average starts at the present one", checkpoint.path.name)
        proximal.sync(networks.policy)
    if reference is not None and reference_moves:
        reference.restore(checkpoint.shards())  # not in the checkpoint of a run that only now lets it move
