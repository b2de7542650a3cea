"""Composition of a `Run`: lock the directory, start the hub, load the model, restore what a predecessor saved."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from learner.audit.audit import Audit
from learner.checkpoint.checkpoint import checkpoint_home
from learner.checkpoint.run_lock import RunLock
from learner.checkpoint.saving import Checkpoints, SaveRetries, Saving
from learner.control.staleness import StalenessControl
from learner.hub.context.settings import HubSettings
from learner.hub_client.link import HubLink
from learner.hub_client.settings import hub_settings, response_limit, stall_fail_s
from learner.loop.evaluations import Evaluations
from learner.loop.finish import finish, record_failure
from learner.loop.run import Run
from learner.loop.steering import Steering
from learner.loop.train import train
from learner.publish.probe import Prober, probe_tokens
from learner.publish.publishing import Versions
from learner.ranks.mesh import Ranks
from learner.ranks.stop_flag import StopFlag
from learner.record.memory import memory_profiled
from learner.record.recorder import Recorder
from learner.record.step_samples import ExpectedAnswers, open_samples
from learner.setup.device import environment
from learner.setup.hub import StartedHub, announce, same_address, start_hub
from learner.setup.inputs import Inputs, open_inputs, prepare_inputs
from learner.setup.publishing import background_of, make_publishing
from learner.setup.recover import Recovered, history_after, recover
from learner.setup.trainer import load_trainer, make_staleness
from learner.sources.hub import HubSource
from learner.sources.skipped import SkippedSteps, why_skipped
from learner.trainer import Trainer
from streamrl.config.load import to_plain
from streamrl.config.rules import largest_max_lag
from streamrl.config.schema import Config
from streamrl.environment import DrivesGeneration
from streamrl.metrics.files import write_atomic
from streamrl.stream.records import RunStarted
from streamrl.weights.assets import pack_assets
from streamrl.weights.shm.directory import document_directory, remove_dead, remove_run_dir
from streamrl.weights.shm.transport import ShmPublisher


def build_run(
    config: Config, run_dir: Path, stop: StopFlag, ranks: Ranks, *, locked: Callable[[], None] = lambda: None
) -> Run:
    """Everything from the lock on the directory to a hub that answers; collective. What fails is taken down again.

    Args:
        locked: called once the directory is this run's and the settings fit its task, before anything that takes long.
    """
    torch.manual_seed(config.run.seed)
    prepare_inputs(config, ranks.device)
    with ExitStack() as undo:
        given = open_inputs(config, run_dir, ranks)
        locked()
        run = _build(config, given, run_dir, stop, ranks, undo)
        undo.pop_all()
        return run


def _build(config: Config, given: Inputs, run_dir: Path, stop: StopFlag, ranks: Ranks, undo: ExitStack) -> Run:
    staleness = make_staleness(config, given.past.controls)
    documents = document_directory(given.past.run_id, run_dir)
    history, recovered = history_after(given, run_dir) if ranks.rank == 0 else None, Recovered()

    def hub() -> StartedHub:
        return start_hub(
            partial(_hub_settings, config, run_dir, given, recovered, ranks, documents, staleness.bounds), run_dir,
            given.start, ranks, undo, silent_s=config.learner.rank_silent_s, in_process=config.launch.in_process,
        )

    if ranks.from_rank_zero(float(bool(history and history.batches))):
        trainer, adapter = load_trainer(config, given.model_dir, given.past, staleness, ranks)
        given, recovered = recover(
            config.policy.lora, config.publish.bucket_bytes, given, history, run_dir, trainer,
            Steering(staleness, ranks, trainer.clock), stop
        )
        started = hub()
    else:  # the hub starts while the networks load
        started = hub()
        trainer, adapter = load_trainer(config, given.model_dir, given.past, staleness, ranks)
    shm = None
    if ranks.rank == 0:
        remove_run_dir(documents, given.past.run_id)  # what a dead predecessor left
        remove_dead()
        shm = ShmPublisher(documents, given.past.run_id, config.publish.num_keep_versions, fallback=run_dir / "weights")
        undo.callback(shm.close)
    link = started.link(config.learner, ranks, stop, version=trainer.version, stall_fail_s=stall_fail_s(config))
    samples = open_samples(
        config.samples, run_dir, given.model_dir, seed=config.run.seed, ranks=ranks, resume_step=trainer.step,
        steps_per_batch=trainer.settings.steps_per_batch,
        expected=ExpectedAnswers(given.task, given.eval_sets), evals_dir=config.eval.directory,
    )
    audit = Audit(
        trainer.networks.policy, ranks, trainer.with_wire_precision, share=config.trust.audit_share,
        seed=config.run.seed, max_lag=largest_max_lag(config), max_tokens=config.learner.max_inference_row_tokens,
        redraws=not isinstance(given.task.env(), DrivesGeneration),
    )
    versions = _make_versions(config, given, trainer, staleness, link, audit, shm)
    skipped = SkippedSteps(run_dir, limit=config.learner.num_max_skipped_steps)
    recorder = _open_recorder(config, run_dir, given, recovered, trainer, link, versions) if ranks.rank == 0 else None
    run = Run(
        config=config, run_dir=run_dir, run_id=given.past.run_id, learner_epoch=given.learner_epoch,
        lineage=given.lineage, model_dir=given.model_dir, adapter=adapter, trainer=trainer, hub=link,
        hub_process=started.process, beats=started.beats, stop=stop, staleness=staleness, samples=samples,
        skipped=skipped, audit=audit, versions=versions, recorder=recorder, resources=ExitStack(),
        source=HubSource(
            link, ranks, trainer.clock, skipped, max_tokens=trainer.settings.max_tokens,
            rules=trainer.objective.reward_rules, bounds=lambda: staleness.bounds,
            seconds=lambda: run.steering.seconds,
        ),
        evaluations=Evaluations(
            given.eval_sets, link, samples, trainer.clock, recorder, every_steps=config.eval.every_steps
        ),
    )
    run.checkpoints = _make_checkpoints(run, given)
    link.on_idle, link.dropped = run.poll, samples.dropped
    _keep(run, given.lock, shm)
    run.eval_lost = given.start > 1 and run.evaluations.lost(
        run_dir, run.step, steps_per_batch=trainer.settings.steps_per_batch
    )
    _tell_recovered(run, recovered)
    if recorder is not None:
        announce(run)
    return run


def _tell_recovered(run: Run, recovered: Recovered) -> None:
    """Hub and record get what they lack of the batches that were trained again."""
    for one in recovered.unended if run.ranks.rank == 0 else ():
        result = one.trained.result if one.trained is not None else None
        run.hub.trained(
            one.version, skipped=result is None or result.skipped, bounds=run.staleness.bounds,
            reason=why_skipped(result) if result is not None else one.cause[:512], trained=result is not None,
            grad_norm=result.grad_norm if result is not None else 0.0,
        )
    for step, trained in recovered.unrecorded:
        run.record(step, trained)


def _hub_settings(
    config: Config, run_dir: Path, given: Inputs, recovered: Recovered, ranks: Ranks, documents: Path,
    bounds: tuple[int, int] | None, rank_endpoint: str,
) -> HubSettings:
    past = given.past
    started = RunStarted(
        past.run_id, given.start, given.learner_epoch, given.version, json.dumps(to_plain(config)),
        environment(ranks), recovered.again_from, recovered.equal,
    )
    return hub_settings(
        config, started=started, run_dir=run_dir, lineage=given.lineage, dp_ranks=ranks.mesh.dp_ranks,
        rank_endpoint=rank_endpoint, shm_dir=documents,
        bind=same_address(config.hub.bind, run_dir, resume=config.checkpoint.resume), vocab_size=given.vocab_size,
        restore_path=past.checkpoint.path / "ledger.bin" if past.checkpoint is not None else None,
        bounds=bounds, device=str(ranks.device),
    )


def _make_versions(
    config: Config, given: Inputs, trainer: Trainer, staleness: StalenessControl, hub: HubLink, audit: Audit,
    shm: ShmPublisher | None,
) -> Versions:
    policy, ranks = trainer.networks.policy, trainer.ranks
    publishing = make_publishing(config.publish, config.policy.lora, policy, ranks, hub, shm=shm, lock=given.lock)
    # Actors' engines hold a prompt and the longest response.
    max_tokens = config.rollout.max_prompt_tokens + response_limit(config)
    every = config.publish.probe_every
    if config.launch.by_turns:
        every = min(every, 1)  # each version wakes engines, whose memory may hold anything before
    prober = Prober(
        policy, probe_tokens(given.model_dir, policy.vocab_size, max_tokens), every=every,
        tolerance=config.publish.probe_tolerance, device=ranks.device,
    )
    return Versions(
        publishing, staleness, trainer.clock, prober, learner_epoch=given.learner_epoch,
        wire_precision=trainer.with_wire_precision, staged=audit.published,
    )


def _make_checkpoints(run: Run, given: Inputs) -> Checkpoints:
    config, trainer = run.config, run.trainer
    saving = Saving(
        run.run_dir, run.hub, run.ranks, num_keep=config.checkpoint.num_keep, lock=given.lock,
        home=checkpoint_home(config.checkpoint.directory, run.run_id, run.run_dir),
        background=background_of(config.checkpoint.beside_training, run.ranks, "checkpoint"),
        version=given.past.version if given.past.checkpoint is not None else -1,
    )
    moves = bool(config.reference.sync_every_steps)
    return Checkpoints(
        saving, SaveRetries(config.checkpoint.grace_s), run.ranks, trainer.clock,
        every_s=60.0 * config.checkpoint.every_minutes, every_steps=config.checkpoint.every_steps,
        steps_per_batch=trainer.settings.steps_per_batch, remembered=run.remembered,
        tensors=lambda: trainer.networks.tensors(reference_moves=moves),
    )


def _open_recorder(
    config: Config, run_dir: Path, given: Inputs, recovered: Recovered, trainer: Trainer, hub: HubLink,
    versions: Versions,
) -> Recorder:
    """The record of the run, once the hub answers; on rank 0."""
    versions.publishing.assets_path = str(run_dir / "assets.msgpack")
    write_atomic(Path(versions.publishing.assets_path), pack_assets(given.model_dir))
    hub.wait_until_up()
    dtype = str(trainer.settings.compute_dtype).removeprefix("torch.")
    return Recorder(
        config, run_dir, given.past.run_id, resume_step=trainer.step, wall_s=max(given.past.wall_s, recovered.wall_s),
        trained_tokens=max(given.past.trained_tokens, recovered.trained_tokens), device=trainer.ranks.device.type,
        dtype=dtype, counters=hub.status.counters,
    )


def _keep(run: Run, lock: RunLock | None, shm: ShmPublisher | None) -> None:
    """Note what is to be closed at the end; in reverse, and each, whatever the others raise."""
    for close in (
        run.ranks.close, lock and lock.release, shm and shm.close, run.hub_process and run.hub_process.abandon,
        run.hub.close, run.checkpoints.saving.close, run.versions.publishing.close, run.beats.close,
        run.samples.close,
    ):
        if close is not None:
            run.resources.callback(close)
    run.resources.enter_context(memory_profiled(run.config.run.memory_interval_s, run.run_dir, run.ranks))


def carry_out(
    config: Config, run_dir: Path, stop: StopFlag, ranks: Ranks, *, locked: Callable[[], None] = lambda: None
) -> tuple[Run, bool]:
    """Do the whole run; returns it, closed, and whether all its steps are done. A failure is recorded and raised."""
    run = build_run(config, run_dir, stop, ranks, locked=locked)
    stop.watch_launcher()
    try:
        completed = train(run)
        finish(run, completed=completed)
    except Exception as error:
        run.beats.failed(error)
        record_failure(run, error)
        raise
    finally:
        tear_down(run)
    return run, completed


def tear_down(run: Run) -> None:
    """Close sockets, shared memory and process group; safe after any failure."""
    run.resources.close()
    logging.getLogger("streamrl").debug("process %d is done", os.getpid())
