"""The networks of a run: the policy, and beside it those that the estimator, the loss and the KL term need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from learner.checkpoint.checkpoint import Checkpoint
from learner.checkpoint.resume import ResumeState
from learner.model.adapter.frozen import FrozenAdapter
from learner.model.adapter.lora import add_adapter, describe
from learner.model.critic import Critic
from learner.model.critic_network import build_critic
from learner.model.optimizer import allocate_moments, make_optimizer
from learner.model.paths import compute_dtype
from learner.model.policy import Policy, load_policy, pass_options
from learner.model.reference import FrozenPolicy, load_reference
from learner.ranks.mesh import Ranks
from streamrl.config.eval_sets import longest_sequence
from streamrl.config.schema import Config, LoraConfig

log = logging.getLogger("streamrl.learner")


@dataclass(frozen=True, slots=True)
class Networks:
    """What is trained and what it is compared with; None where nothing would read it."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: Critic | None
    reference: FrozenPolicy | None
    proximal: FrozenPolicy | None

    @property
    def shares_prompts(self) -> bool:
        """Whether all of them may read a prompt once for several answers."""
        networks = (self.policy, self.critic and self.critic.module, self.reference, self.proximal)
        return all(network.shares_prompts for network in networks if network is not None)


def load_networks(
    config: Config, model_dir: Path, past: ResumeState, ranks: Ranks, *, with_critic: bool, with_reference: bool
) -> Networks:
    """Every network as the starting model or the predecessor's checkpoint has it; a collective call."""
    dtype, lora = compute_dtype(config.policy.dtype, ranks.device), config.policy.lora
    adapt = partial(add_adapter, config=lora, seed=config.run.seed, dtype=dtype) if lora.rank is not None else None

    def load() -> Policy:
        return load_policy(
            model_dir, dtype=dtype, ranks=ranks, gradient_checkpointing=config.policy.gradient_checkpointing,
            adapt=adapt, **pass_options(config),
        )

    if not config.policy.tiny.enabled:
        log.info("loading the model from %s", model_dir)
    policy = load()
    if adapt is not None:
        log.info("%s", describe(policy, lora, config.policy.optimizer.lr))
    critic = build_critic(
        config.critic, config.advantage.estimator, policy, model_dir, num_steps=config.trainer.num_steps, dtype=dtype,
        ranks=ranks, max_tokens=longest_sequence(config),
    ) if with_critic else None
    networks = Networks(
        policy, make_optimizer(policy, config.policy.optimizer), critic,
        reference=_reference(config, model_dir, policy, ranks, dtype) if with_reference else None,
        proximal=_proximal(policy, load, lora) if config.loss.anchor == "ewma" else None,
    )
    if past.checkpoint is not None:
        past.checkpoint.restore(policy, networks.optimizer, ranks)
        _restore_beside(past.checkpoint, networks, reference_moves=bool(config.reference.sync_every_steps))
    if config.learner.gpu_memory_share is not None:  # before actors measure what is free beside this process
        allocate_moments(networks.optimizer)
        if critic is not None:
            allocate_moments(critic.optimizer)
    return networks


def _reference(
    config: Config, model_dir: Path, policy: Policy, ranks: Ranks, dtype: torch.dtype
) -> FrozenPolicy:
    """The start of the run is the base alone where an adapter is trained: no second copy of the weights."""
    if config.policy.lora.rank is not None and config.reference.model_path is None:
        return FrozenAdapter(policy, name="reference", off=True)
    return load_reference(config, model_dir, policy, ranks, dtype=dtype)


def _proximal(policy: Policy, load: Callable[[], Policy], lora: LoraConfig) -> FrozenPolicy:
    if lora.rank is not None:
        return FrozenAdapter(policy, name="ewma", off=False)
    return FrozenPolicy(load(), name="ewma")


def _restore_beside(checkpoint: Checkpoint, networks: Networks, *, reference_moves: bool) -> None:
    """The networks beside the policy; one that the run gained since the checkpoint starts from its own beginning."""
    critic, proximal, reference = networks.critic, networks.proximal, networks.reference
    if critic is not None and not critic.restore(checkpoint.shards()):
        log.warning("%s holds no critic: it starts untrained", checkpoint.path.name)
    if proximal is not None and not proximal.restore(checkpoint.shards()):
        log.warning("%s holds no averaged policy: the average starts at the current one", checkpoint.path.name)
        proximal.sync(networks.policy)
    if reference is not None and reference_moves:
        reference.restore(checkpoint.shards())  # not in the checkpoint of a run that only now lets it move
