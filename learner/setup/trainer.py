"""The trainer of a run: objective, networks and schedule, as the settings and a predecessor's checkpoint say."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from envs.data.chat_template import template_of_settings
from learner.checkpoint.checkpoint import Checkpoint, ResumeState
from learner.control.staleness import StalenessControl
from learner.data.packing import LeaveOut
from learner.hub_client.settings import answer_limit, trained_scores
from learner.loop.steering import Steering
from learner.model.adapter.lora import AdapterOf, FrozenAdapter, add_adapter, check_resumed, describe, describe_adapter
from learner.model.critic import build_critic
from learner.model.networks import FrozenPolicy, Networks, load_reference
from learner.model.optimizer import allocate_moments, make_optimizer, make_schedule
from learner.model.paths import compute_dtype, wire_dtype
from learner.model.policy import Policy, keep_gathered, load_policy, pass_options
from learner.model.teacher import load_teacher
from learner.objective.objective import Objective
from learner.objective.options import need, needs_reference
from learner.objective.regularizers import LossWeights, Regularizers
from learner.objective.rewards import RewardRules
from learner.objective.shadow import Shadow
from learner.publish.export import export_model, used_template
from learner.publish.rounding import round_frozen
from learner.ranks.mesh import Ranks
from learner.setup.group_mask import group_mask
from learner.setup.shadows import make_shadows
from learner.trainer import Trainer, TrainerSettings
from streamrl.architectures.positions import num_positions
from streamrl.config.eval_sets import longest_sequence
from streamrl.config.rules import lag_rule, largest_max_lag, soft_max_lag, steps_per_batch
from streamrl.config.schema import Config, CriticKind, LoraBase, LoraConfig, ReferenceConfig, SkipZeroAdvantage
from streamrl.errors import ConfigError
from streamrl.weights.saved import weights_digest

log = logging.getLogger("streamrl.learner")


def load_trainer(
    config: Config, model_dir: Path, past: ResumeState, staleness: StalenessControl, ranks: Ranks
) -> tuple[Trainer, AdapterOf | None]:
    """The trainer with its networks, and what identifies the adapter that it trains, if it is one."""
    objective, shadows = make_objective(
        config, staleness, past.controls, num_steps=past.version // steps_per_batch(config)
    )
    adapter = describe_adapter(config.policy.lora, model_dir, ranks)
    if past.checkpoint is not None:
        check_resumed(past.checkpoint.extra.get("adapter"), adapter, ranks)
    with_reference, reference = needs_reference(config.kl, config.constraint), config.reference
    if past.checkpoint is not None and adapter is None:
        check_starting_model(
            past.checkpoint.extra.get("start_model"), model_dir, ranks,
            is_reference=with_reference and reference.model_path is None and not reference.sync_every_steps,
        )
    networks = load_networks(
        config, model_dir, past, ranks, with_critic=objective.has_critic, with_reference=with_reference
    )
    settings = _trainer_settings(config, ranks)
    schedule = make_schedule(
        config.policy.optimizer, config.policy.scheduler, num_steps=config.trainer.num_steps,
        steps_per_batch=settings.steps_per_batch, lr_scale=config.policy.lora.lr_scale if adapter else 1.0,
        num_frozen_steps=settings.num_critic_warmup_steps if objective.has_critic else 0,
    )
    trainer = Trainer(networks, schedule, objective, settings, ranks, past.version, shadows=shadows)
    if config.policy.lora.rank is not None:  # what the adapter is added to, in the values that actors get
        round_frozen(networks.policy, settings.wire_dtype)
    return trainer, adapter


def check_starting_model(saved: str | None, model_dir: Path, ranks: Ranks, *, is_reference: bool) -> None:
    """Refuse another starting model than the run's where it is the reference, and tell of it elsewhere; collective.

    Args:
        saved: folder of the run's; None in a checkpoint of an earlier release.
    Raises:
        ConfigError: on every rank.
    """
    before, problem = Path(saved or model_dir), ""
    if ranks.rank == 0 and before.resolve() != model_dir.resolve():
        if not before.is_dir():
            if is_reference and before.name != model_dir.name:  # a run that was moved keeps its own
                log.warning("%s, where the run started, is not there: %s must have the same weights, as the reference",
                            before, model_dir)
        elif weights_digest(before) != weights_digest(model_dir):
            problem = f"the run started from the weights in {before}, and those in {model_dir} are others"
    if ranks.maximum(float(bool(problem and is_reference))):
        raise ConfigError(
            f"{problem or 'rank 0 found other weights to start from'}: they would become the reference. Set "
            f"policy.model_path as it was, or reference.model_path={before}"
        )
    if problem:
        log.warning("%s: they are not read, since the run goes on with those of its checkpoint", problem)


def _trainer_settings(config: Config, ranks: Ranks) -> TrainerSettings:
    learner, policy = config.learner, config.policy
    return TrainerSettings(
        max_tokens=learner.max_row_tokens, num_minibatches=learner.num_minibatches,
        max_inference_tokens=learner.max_inference_row_tokens if learner.max_inference_tokens_per_device else None,
        num_epochs=learner.num_epochs, max_grad_norm=policy.optimizer.max_grad_norm, reduce_once=learner.reduce_once,
        ewma_decay=config.loss.ewma_decay, sync_reference_every=config.reference.sync_every_steps,
        num_critic_warmup_steps=config.critic.num_warmup_steps,
        gradient_cosine=learner.gradient_cosine, stop_kl=math.inf if learner.stop_kl is None else learner.stop_kl,
        compute_dtype=compute_dtype(policy.dtype, ranks.device),
        wire_dtype=wire_dtype(config.publish.dtype, ranks.device),
    )


def make_objective(
    config: Config, staleness: StalenessControl, controls: Mapping[str, Any], *, num_steps: int
) -> tuple[Objective, tuple[Shadow, ...]]:
    """The training objective and its shadows; weights of its terms and reward rules go on from `controls`.

    Args:
        num_steps: batches trained so far.
    Raises:
        ConfigError: a setting that does nothing or is impossible together with the others.
    """
    loss_weights = LossWeights(
        config.kl, config.entropy, config.constraint, config.loss, num_steps=num_steps,
        total_steps=config.trainer.num_steps,
    )
    if "loss" in controls:
        loss_weights.restore(controls["loss"])
    reward_rules = RewardRules(
        config.objectives, config.overlong, max_tokens=answer_limit(config), correct=config.reward.correct
    )
    reward_rules.restore(controls.get("scores", {}))
    objective = Objective(
        config.advantage, config.loss, max_lag=largest_max_lag(config), max_new_tokens=answer_limit(config),
        regularizers=Regularizers(config.kl, config.constraint, config.loss, loss_weights, config.distill),
        reward_rules=reward_rules, filter_truncated=config.filter.truncated, steps_per_batch=steps_per_batch(config),
        leave_out=leaves_out(config.learner.skip_zero_advantage, staleness, shadows=bool(config.shadow.algorithms)),
        group_mask=group_mask(config.filter, trained_scores(config)),
    )
    _check_inference_budget(config, objective)
    shadows = make_shadows(
        config.shadow.algorithms, objective, config.kl, config.constraint, max_lag=largest_max_lag(config),
        num_minibatches=config.learner.num_minibatches, distill=config.distill,
    )
    return objective, shadows


def make_staleness(config: Config, controls: Mapping[str, Any]) -> StalenessControl:
    """The staleness control: lead and bound go on from `controls`."""
    staleness = StalenessControl(
        config.staleness, config.loss, config.policy.scheduler, config.publish.when, rule=lag_rule(config),
        soft_max_lag=soft_max_lag(config), every_steps=config.publish.every_steps,
    )
    if "staleness" in controls:
        staleness.restore(controls["staleness"])
    return staleness


def leaves_out(wish: SkipZeroAdvantage, staleness: StalenessControl, *, shadows: bool = False) -> LeaveOut:
    """The passes that trajectories without a gradient go without, as far as the control and shadows allow it."""
    if wish is SkipZeroAdvantage.never:
        return LeaveOut.NOTHING
    needed = wish is SkipZeroAdvantage.auto and (staleness.reads_ratios or shadows)
    return LeaveOut.BACKWARD if needed else LeaveOut.PASS


def _check_inference_budget(config: Config, objective: Objective) -> None:
    budget = config.learner.max_inference_tokens_per_device
    if budget is None:
        return
    need(
        config.critic.kind is CriticKind.model or not objective.has_critic,
        f"learner.max_inference_tokens_per_device={budget} is not for critic.kind=head, which keeps the states of the "
        "micro-batches that are trained: set critic.kind=model, or leave it out",
    )
    need(
        bool(objective.needs) or objective.leave_out is LeaveOut.BACKWARD or config.trust.audit_share > 0.0,
        f"learner.max_inference_tokens_per_device={budget} does nothing: these settings make no pass without gradient",
    )


def load_networks(
    config: Config, model_dir: Path, past: ResumeState, ranks: Ranks, *, with_critic: bool, with_reference: bool
) -> Networks:
    """Every network as the starting model or the predecessor's checkpoint has it; a collective call."""
    dtype, lora = compute_dtype(config.policy.dtype, ranks.device), config.policy.lora
    adapt = partial(add_adapter, config=lora, seed=config.run.seed, dtype=dtype) if lora.rank is not None else None

    longest = longest_sequence(config, num_positions(model_dir))
    passes = pass_options(config.learner, max_tokens=longest)

    def load() -> Policy:
        return load_policy(
            model_dir, dtype=dtype, ranks=ranks, gradient_checkpointing=config.policy.gradient_checkpointing,
            adapt=adapt, adapts_whole=lora.base_quantization is not LoraBase.none, **passes,
        )

    if not config.policy.tiny.enabled:
        log.info("loading the model from %s", model_dir)
    policy = load()
    if not config.learner.reshard_after_forward:
        keep_gathered(policy)
    if adapt is not None:
        log.info("%s", describe(policy, lora, config.policy.optimizer.lr))
    critic = build_critic(
        config.critic, config.advantage.estimator, policy, model_dir, num_steps=config.trainer.num_steps, dtype=dtype,
        ranks=ranks, max_tokens=longest,
    ) if with_critic else None
    networks = Networks(
        policy, make_optimizer(policy, config.policy.optimizer), critic,
        reference=None if not with_reference else _reference(
            config.reference, lora, model_dir, policy, ranks, dtype, passes
        ),
        proximal=_proximal(policy, load, lora) if config.loss.anchor == "ewma" else None,
        teacher=None if config.distill.teacher is None else load_teacher(
            config.distill.teacher, policy, model_dir, ranks, passes=passes, dtype=dtype,
            temperature=config.rollout.train.sampling.temperature,
        ),
    )
    if past.checkpoint is not None:
        past.checkpoint.restore(policy, networks.optimizer, ranks)
        _restore_auxiliary(past.checkpoint, networks, reference_moves=bool(config.reference.sync_every_steps))
    if config.learner.gpu_memory_share is not None:  # before actors measure what is free beside this process
        allocate_moments(networks.optimizer)
        if critic is not None:
            allocate_moments(critic.optimizer)
    return networks


def _reference(
    settings: ReferenceConfig, lora: LoraConfig, model_dir: Path, policy: Policy, ranks: Ranks, dtype: torch.dtype,
    passes: Mapping[str, Any],
) -> FrozenPolicy:
    """The start of the run is the base alone where an adapter is trained: no second copy of the weights."""
    if lora.rank is not None and settings.model_path is None:
        return FrozenAdapter(policy, name="reference", off=True)
    return load_reference(settings, model_dir, policy, ranks, passes=passes, dtype=dtype)


def _proximal(policy: Policy, load: Callable[[], Policy], lora: LoraConfig) -> FrozenPolicy:
    if lora.rank is not None:
        return FrozenAdapter(policy, name="ewma", off=False)
    return FrozenPolicy(load(), name="ewma")


def _restore_auxiliary(checkpoint: Checkpoint, networks: Networks, *, reference_moves: bool) -> None:
    """The networks beside the policy; one that the run gained since the checkpoint starts from its own beginning."""
    critic, proximal, reference = networks.critic, networks.proximal, networks.reference
    if critic is not None and not critic.restore(checkpoint.shards()):
        log.warning("%s holds no critic: it starts untrained", checkpoint.path.name)
    if proximal is not None and not proximal.restore(checkpoint.shards()):
        log.warning("%s holds no averaged policy: the average starts at the current one", checkpoint.path.name)
        proximal.sync(networks.policy)
    if reference is not None and reference_moves:
        reference.restore(checkpoint.shards())  # not in the checkpoint of a run that only now lets it move
    elif reference is not None and checkpoint.shards().has("frozen/reference/"):
        log.warning("reference.sync_every_steps=0: the reference is not the one that the run had synced, but the model "
                    "it began with; a number beyond trainer.num_steps would keep that one")


def steered_trainer(config: Config, model_dir: Path) -> tuple[Trainer, StalenessControl]:
    """A trainer at version 0 in this process alone, and the staleness control that steers it."""
    torch.manual_seed(config.run.seed)
    ranks, staleness = Ranks(), make_staleness(config, {})
    trainer, _ = load_trainer(config, model_dir, ResumeState("alone"), staleness, ranks)
    trainer.callbacks = Steering(staleness, ranks, trainer.clock)
    return trainer, staleness


def save_policy(config: Config, trainer: Trainer, model_dir: Path, folder: Path) -> Path:
    """Write the policy as a Hugging Face checkpoint in the type that actors would get; an adapter is within it, too."""
    lora = config.policy.lora if config.policy.lora.rank is not None else None
    return export_model(
        trainer.networks.policy, model_dir, folder, trainer.ranks, lora=lora, adapter_within=True,
        dtype=trainer.settings.wire_dtype, chat_template=template_of_settings(used_template(config.data)),
    )
