"""From config to a `Run`: lock the directory, start the hub, load the model, restore what a predecessor saved."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from envs.check import check_task
from envs.data.sources import absolute
from envs.data_task import DataTask
from envs.registry import task_of
from learner.background import Background
from learner.checkpoint.resume import ResumeState, find_resume_state, surviving_lineage
from learner.checkpoint.run_lock import RunLock, lock_run_dir
from learner.checkpoint.saving import Saving
from learner.control.staleness import StalenessControl
from learner.data.selection import LeaveOut
from learner.data.trajectories import TrajectoryReader
from learner.hub_client.endpoint import RankDoor, agree
from learner.hub_client.link import HubLink
from learner.hub_client.process import HubProcess
from learner.hub_client.settings import (
    answer_limit,
    hub_settings,
    response_limit,
    stall_fail_s,
    steps_between_checkpoints,
)
from learner.model.adapter.base import check_resumed, describe_adapter
from learner.model.adapter.lora import adapter_parameters
from learner.model.optimizer import make_schedule
from learner.model.parameters import policy_parameters
from learner.model.paths import compute_dtype, model_directory, policy_vocab_size, wire_dtype
from learner.model.policy import Policy
from learner.objective.kl_options import needs_reference
from learner.objective.loss_weights import LossWeights
from learner.objective.objective import Objective
from learner.objective.regularizers import Regularizers
from learner.objective.rewards import RewardRules
from learner.publish.base import publish_base
from learner.publish.probe import Prober, probe_tokens
from learner.publish.publisher import Publisher
from learner.publish.publishing import Publishing
from learner.publish.rounding import round_frozen
from learner.ranks.beats import RankBeats
from learner.ranks.mesh import Ranks
from learner.ranks.stop_flag import StopFlag
from learner.record.expected import ExpectedAnswers
from learner.record.recorder import Recorder
from learner.record.step_samples import open_samples
from learner.run import Run
from learner.setup.model_hub import find_models
from learner.setup.networks import load_networks
from learner.setup.preflight import check_settings, checked_eval_sets, template_text
from streamrl.config.addresses import is_wildcard
from streamrl.config.eval_sets import EvalSet
from streamrl.config.load import to_plain
from streamrl.config.rules import largest_max_lag, lookahead, steps_per_batch
from streamrl.config.schema import Config, SkipZeroAdvantage
from streamrl.config.schema_system import BesideTraining
from streamrl.environment import DrivesGeneration, Task
from streamrl.messages import Base
from streamrl.metrics.files import read_object, write_atomic
from streamrl.named_code import words_for_actors
from streamrl.process_memory import keep_freed_memory
from streamrl.weights.assets import pack_assets
from streamrl.weights.shm.directory import document_directory, remove_dead, remove_run_dir
from streamrl.weights.shm.transport import ShmPublisher
from streamrl.weights.transport import device_transports

log = logging.getLogger("streamrl.learner")


def start_ranks(config: Config) -> Ranks:
    """Join the other learner processes, if there are any."""
    ranks = Ranks.start(config.run.device, timeout_s=config.learner.rank_timeout_s)
    limit_gpu_memory(config.learner.gpu_memory_share, ranks.device)
    if ranks.device.type == "cpu":
        keep_freed_memory()
        if config.run.num_threads:
            torch.set_num_threads(config.run.num_threads)
    return ranks


def limit_gpu_memory(share: float | None, device: torch.device) -> None:
    """Keep to this part of the GPU, and tell that it does nothing where there is none."""
    if device.type == "cuda" and share is not None:
        torch.cuda.set_per_process_memory_fraction(share, device)
    elif share is not None:
        log.warning("learner.gpu_memory_share=%g only divides a GPU's memory, and the learner is on a CPU", share)


def build_run(config: Config, run_dir: Path, stop: StopFlag, ranks: Ranks) -> Run:
    """Everything from the lock on the directory to a hub that answers; collective. What fails is taken down again."""
    _check_before_loading(config, ranks.device)
    with ExitStack() as undo:
        run = _build(config, run_dir, stop, ranks, undo)
        undo.pop_all()
        return run


def _check_before_loading(config: Config, device: torch.device) -> None:
    torch.manual_seed(config.run.seed)
    if config.env.path is not None:  # actors read it too, perhaps from another working directory
        config.env.path = str(Path(config.env.path).resolve())
    config.reward.model.path = absolute(config.reward.model.path)
    for key in ("path", "test_path"):
        setattr(config.data, key, absolute(getattr(config.data, key)))
    config.data.chat_template = template_text(config.data.chat_template)  # actors may have no such file
    config.eval.datasets = {name: _absolute_set(given) for name, given in config.eval.datasets.items()}
    find_models(config, log.info)
    check_settings(config, device)


def _absolute_set(given: Any) -> Any:
    """An entry of `eval.datasets` with files of this machine made absolute, as the run's own are."""
    if not isinstance(given, Mapping):
        return absolute(given)
    made = {key: _absolute_set(value) if key in ("data", "env") else value for key, value in given.items()}
    made |= {key: absolute(made[key]) for key in ("path", "test_path") if key in made}
    if "chat_template" in made:
        made["chat_template"] = template_text(made["chat_template"])
    return made


def _build(config: Config, run_dir: Path, stop: StopFlag, ranks: Ranks, undo: ExitStack) -> Run:
    rank_zero = ranks.rank == 0
    lock = lock_run_dir(run_dir) if rank_zero else None
    epoch = int(ranks.maximum(float(lock.learner_epoch if lock else 0)))
    task = task_of(config)
    check_task(task, limit_s=config.env.step_timeout_s)  # fails here by name, not in an actor an hour later
    sets = fit_to_records(config, task)
    model_dir = model_directory(config, task, ranks)
    vocab_size = policy_vocab_size(model_dir)
    past = find_resume_state(config, run_dir, ranks)
    lineage = surviving_lineage(past, epoch)
    door = RankDoor.make() if rank_zero else None
    loss_weights, reward_rules, staleness = _restored_controls(config, past)
    documents = document_directory(past.run_id, run_dir)
    hub_process = shm = None
    if door is not None:  # the hub imports and binds while the networks load here
        hub_process = HubProcess(hub_settings(
            config, run_id=past.run_id, run_dir=run_dir, learner_epoch=epoch, version=past.version,
            lineage=lineage[:-1], dp_ranks=ranks.mesh.dp_ranks, rank_endpoint=door.bind, shm_dir=documents,
            bind=same_address(config.hub.bind, run_dir, resume=config.checkpoint.resume), vocab_size=vocab_size,
            restore_path=past.checkpoint.path / "ledger.bin" if past.checkpoint is not None else None,
            bounds=staleness.bounds, device=str(ranks.device),
        ), door.keys)
        undo.callback(hub_process.abandon)
    endpoint = agree(ranks, lambda: door.endpoint(run_dir, epoch, hub_process.check))
    beats = undo.enter_context(
        RankBeats(endpoint.address, ranks, silent_s=config.learner.rank_silent_s, key=endpoint.key)
    )
    objective = Objective(
        config.advantage, config.loss, max_lag=largest_max_lag(config),
        regularizers=Regularizers(config.kl, config.constraint, config.loss, loss_weights),
        max_new_tokens=answer_limit(config), ranks=ranks, reward_rules=reward_rules,
        filter_truncated=config.filter.truncated, leave_out=leaves_out(config, staleness),
        steps_per_batch=steps_per_batch(config),
    )
    adapter = describe_adapter(config.policy.lora, model_dir, ranks)
    if past.checkpoint is not None:
        check_resumed(past.checkpoint.extra.get("adapter"), adapter, ranks)
    networks = load_networks(
        config, model_dir, past, ranks, with_critic=objective.has_critic,
        with_reference=needs_reference(config.kl, config.constraint),
    )
    if rank_zero:
        remove_run_dir(documents, past.run_id)  # what a dead predecessor left
        remove_dead()
        shm = ShmPublisher(documents, past.run_id, config.publish.num_keep_versions, fallback=run_dir / "weights")
        undo.callback(shm.close)
    hub = HubLink(
        endpoint.address, key=endpoint.key, rank=ranks.rank, world=ranks.mesh.world, version=past.version,
        check_hub=hub_process.check if hub_process else lambda: None, stop_requested=stop,
        stall_report_s=config.learner.stall_report_s, stall_fail_s=stall_fail_s(config),
        rank_silent_s=config.learner.rank_silent_s or config.learner.rank_timeout_s,
    )
    reader = TrajectoryReader(vocab_size=vocab_size)
    samples = open_samples(
        config.samples, run_dir, model_dir, seed=config.run.seed, ranks=ranks, reader=reader,
        resume_step=past.version // steps_per_batch(config), steps_per_batch=steps_per_batch(config),
        expected=ExpectedAnswers(task, sets),
    )
    run = Run(
        config=config, run_dir=run_dir, run_id=past.run_id, learner_epoch=epoch, lineage=lineage, version=past.version,
        ranks=ranks, policy=networks.policy, optimizer=networks.optimizer, critic=networks.critic, beats=beats,
        reference=networks.reference, proximal=networks.proximal, loss_weights=loss_weights, staleness=staleness,
        schedule=make_schedule(
            config.policy.optimizer, config.policy.scheduler,
            num_steps=config.trainer.num_steps * steps_per_batch(config),
            lr_scale=config.policy.lora.lr_scale if adapter else 1.0,
        ),
        objective=objective, publishing=_make_publishing(config, networks.policy, ranks, shm, lock, hub), stop=stop,
        lock=lock, adapter=adapter,
        saving=Saving(
            run_dir, hub, ranks, num_keep=config.checkpoint.num_keep, lock=lock,
            beside=background_of(config.checkpoint.beside_training, ranks, "checkpoint"),
            version=past.version if past.checkpoint is not None else -1,
        ),
        prober=_make_prober(config, networks.policy, model_dir, ranks.device), hub=hub,
        hub_process=hub_process, shm=shm, reader=reader, model_dir=model_dir, samples=samples,
        eval_sets=sets, shares_prompts=networks.shares_prompts,
    )
    hub.meanwhile, run.audit.redraws = run.poll, not isinstance(task.env(), DrivesGeneration)
    hub.dropped = samples.dropped
    if rank_zero:
        _finish_rank_zero(run, past)
    return run


def leaves_out(config: Config, staleness: StalenessControl) -> LeaveOut:
    """What trajectories that cannot change the gradient go without, as far as the control allows it."""
    wish = config.learner.skip_zero_advantage
    if wish is SkipZeroAdvantage.never:
        return LeaveOut.NOTHING
    needed = wish is SkipZeroAdvantage.auto and staleness.reads_ratios
    return LeaveOut.BACKWARD if needed else LeaveOut.PASS


def fit_to_records(config: Config, task: Task) -> list[EvalSet]:
    """What follows from the number of records: the steps of `trainer.num_epochs`, and the size of evaluations.

    Returns:
        the evaluation sets, none asked for more prompts than it has.
    """
    source = getattr(task, "base", task)  # of a task with tools around it
    if isinstance(source, DataTask):
        log.info("data: %s", source.dataset)
    num_train, epochs = task.num_records("train"), config.trainer.num_epochs
    if epochs is not None:
        config.trainer.num_steps = max(1, math.ceil(epochs * num_train / config.rollout.num_prompts_per_step))
        log.info("trainer.num_epochs=%g over %d records: %d steps of %d prompts", epochs, num_train,
                 config.trainer.num_steps, config.rollout.num_prompts_per_step)
    return [one if one.name else _cut_to(one, task.num_records("test")) for one in checked_eval_sets(config)]


def _cut_to(one: EvalSet, num_records: int) -> EvalSet:
    """The run's own set without a prompt twice; the config keeps the number that was asked for, for later readers."""
    asked = one.config.eval
    return replace(one, config=replace(one.config, eval=replace(
        asked, num_samples=min(asked.num_samples, num_records))))


def _make_publishing(
    config: Config, policy: Policy, ranks: Ranks, shm: ShmPublisher | None, lock: RunLock | None, hub: HubLink
) -> Publishing:
    """A collective call."""
    adapted = bool(config.policy.lora.rank)
    publisher = Publisher(
        adapter_parameters(policy) if adapted else policy_parameters(policy.model),
        wire_dtype=wire_dtype(config.publish.dtype, ranks.device),
        bucket_bytes=config.publish.bucket_bytes, shm=shm, ranks=ranks, fence=lock.check if lock else None,
        fold=bool(device_transports(config.publish.transports, setting="publish.transports")),
    )
    return Publishing(
        publisher, hub, ranks, base=_publish_base(config, policy, ranks, shm) if adapted else None,
        beside=background_of(config.publish.beside_training, ranks, "publish"),
    )


def background_of(wish: BesideTraining, ranks: Ranks, name: str) -> Background[Any] | None:
    """A thread beside training where the setting asks for one here; a collective call."""
    asked = wish is BesideTraining.always or (wish is BesideTraining.auto and ranks.device.type == "cuda")
    return Background(ranks, name) if asked else None


def _publish_base(
    config: Config, policy: Policy, ranks: Ranks, shm: ShmPublisher | None
) -> tuple[Base, str] | None:
    """What adapters are added to, in the values that actors get; a collective call."""
    wire = wire_dtype(config.publish.dtype, ranks.device)
    round_frozen(policy, wire)
    return publish_base(policy, config, wire_dtype=wire, ranks=ranks, shm=shm)


def _make_prober(config: Config, policy: Policy, model_dir: Path, device: torch.device) -> Prober:
    longest = config.rollout.max_prompt_tokens + response_limit(config)  # the actors' engines hold that much
    return Prober(
        policy, probe_tokens(model_dir, policy.vocab_size, longest), every=config.publish.probe_every,
        tolerance=config.publish.probe_tolerance, device=device,
    )


def _restored_controls(config: Config, past: ResumeState) -> tuple[LossWeights, RewardRules, StalenessControl]:
    """Weights of KL, entropy and constraints, reward rules, lead and bound, as the predecessor left them."""
    done = past.version // steps_per_batch(config)
    loss_weights = LossWeights(config.kl, config.entropy, config.constraint, config.loss, num_steps=done)
    if "loss" in past.controls:
        loss_weights.restore(past.controls["loss"])
    reward_rules = RewardRules(config.objectives, config.overlong, max_tokens=answer_limit(config))
    reward_rules.restore(past.controls.get("scores", {}))
    staleness = StalenessControl(config)
    if "staleness" in past.controls:
        staleness.restore(past.controls["staleness"])
    return loss_weights, reward_rules, staleness


def _finish_rank_zero(run: Run, past: ResumeState) -> None:
    assets = run.run_dir / "assets.msgpack"
    write_atomic(assets, pack_assets(run.model_dir))
    run.publishing.assets_path = str(assets)
    run.hub.wait_until_up()
    dtype = compute_dtype(run.config.policy.dtype, run.ranks.device)
    run.recorder = Recorder(
        run.config, run.run_dir, run.run_id, resume_step=run.step, wall_s=past.wall_s,
        trained_tokens=past.trained_tokens, device=run.ranks.device.type, dtype=str(dtype).removeprefix("torch."),
        counters=run.hub.status.counters,
    )
    _announce(run)


def _announce(run: Run) -> None:
    """Log where actors connect, and how old data may get."""
    connect = json.loads((run.run_dir / "hub.json").read_text())["connect"]
    rollout, staleness = run.config.rollout, run.config.staleness
    key = ["actors.key=FILE"] if run.config.hub.keys else []
    words = shlex.join([f"connect={connect}", *key, *words_for_actors(to_plain(run.config))])
    log.info("hub listens at %s: start actors with  streamrl actor %s", connect, words)
    every = steps_between_checkpoints(run.config)
    if every != run.config.checkpoint.every_steps:
        log.info("checkpoints every %d steps instead of %d: what is trained in between must fit into one actor's "
                 "outbox", every, run.config.checkpoint.every_steps)
    log.info(
        "run %s (id %s), epoch %d, step %d of %d; B=%d groups x G=%d%s, eta=%d%s, window=%d: head lag is at most %d",
        run.run_dir.name, run.run_id, run.learner_epoch, run.step, run.config.trainer.num_steps,
        rollout.num_prompts_per_step, rollout.num_responses_per_prompt,
        f", {run.steps_per_batch} optimizer steps a batch" if run.steps_per_batch > 1 else "", staleness.eta,
        " at first" if staleness.adaptive.enabled else "", lookahead(run.config), largest_max_lag(run.config),
    )


def same_address(bind: str, run_dir: Path, *, resume: bool) -> str:
    """A resumed learner that may take any port takes its predecessor's, the address its actors will retry."""
    before = str(read_object(run_dir / "hub.json").get("connect", ""))
    if not (resume and bind.endswith(":0") and before):
        return bind
    # The predecessor may have run on another machine: what stands for every interface stays so, with its port.
    return bind[:-1] + before.rpartition(":")[2] if is_wildcard(bind) else before


def tear_down(run: Run) -> None:
    """Close sockets, shared memory and process group; safe after any failure."""
    with ExitStack() as last:  # in reverse; each comes, whatever the others raise
        last.callback(run.ranks.close)
        for one in (
            run.lock and run.lock.release, run.shm and run.shm.close, run.hub_process and run.hub_process.abandon,
            run.hub.close, run.saving.close, run.publishing.close, run.beats.close, run.samples.close,
        ):
            if one is not None:
                last.callback(one)
    logging.getLogger("streamrl").debug("process %d is done", os.getpid())
