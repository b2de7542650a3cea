"""From config to a `Run`: claim the directory, start the hub, load the model, restore what a predecessor saved."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from envs.check import check_task
from envs.registry import load_task
from learner.checkpoint.resume import ResumeState, find_resume_state, surviving_lineage
from learner.checkpoint.run_lock import RunLock, claim_run_dir
from learner.control.staleness import StalenessControl
from learner.data.trajectories import TrajectoryReader
from learner.dry_run import run_dry
from learner.hub_client.link import HubLink
from learner.hub_client.process import HubProcess, private_rank_endpoint
from learner.hub_client.settings import answer_limit, hub_settings, response_limit, steps_between_checkpoints
from learner.mesh import Ranks
from learner.model.build import load_networks
from learner.model.optimizer import check_optimizer, make_schedule
from learner.model.paths import compute_dtype, model_directory, policy_vocab_size, wire_dtype
from learner.model.policy import Policy
from learner.objective.loss_weights import LossWeights
from learner.objective.objective import Objective
from learner.objective.regularizers import Regularizers
from learner.objective.rewards import RewardRules
from learner.publish.probe import Prober, probe_tokens
from learner.publish.publisher import Publisher, policy_parameters
from learner.record.recorder import Recorder
from learner.run import Run
from learner.stop_flag import StopFlag
from streamrl.config.rules import largest_max_lag, lookahead
from streamrl.config.schema import Config
from streamrl.messages import Lineage
from streamrl.weights.assets import pack_assets
from streamrl.weights.shm.directory import clean_stale, document_directory
from streamrl.weights.shm.transport import ShmPublisher
from streamrl.weights.transport import device_transports, load_transport

log = logging.getLogger("streamrl.learner")


def start_ranks(config: Config) -> Ranks:
    """Join the other learner processes, if there are any."""
    ranks = Ranks.start(config.run.device, timeout_s=config.learner.rank_timeout_s)
    if config.run.num_threads and ranks.device.type == "cpu":
        torch.set_num_threads(config.run.num_threads)
    return ranks


def build_run(config: Config, run_dir: Path, stop: StopFlag, ranks: Ranks) -> Run:
    """Everything from the claim of the directory to a hub that answers; collective. What fails is taken down again."""
    with ExitStack() as undo:
        run = _build(config, run_dir, stop, ranks, undo)
        undo.pop_all()
        return run


def check_transports(transports: Sequence[str], device: torch.device) -> None:
    """Refuse a transport that is unknown or that this machine cannot use. Raises ConfigError."""
    for name in transports:
        load_transport(name, setting="publish.transports").require(str(device))


def _build(config: Config, run_dir: Path, stop: StopFlag, ranks: Ranks, undo: ExitStack) -> Run:
    check_transports(config.publish.transports, ranks.device)
    torch.manual_seed(config.run.seed)
    if config.env.path is not None:  # actors read it too, perhaps from another working directory
        config.env.path = str(Path(config.env.path).resolve())
    run_dry(config)
    for section, optimizer in (("policy", config.policy.optimizer), ("critic", config.critic.optimizer)):
        check_optimizer(optimizer, setting=f"{section}.optimizer")
    claim = claim_run_dir(run_dir) if ranks.rank == 0 else None
    epoch = int(ranks.maximum(float(claim.learner_epoch if claim else 0)))
    task = load_task(config.env.name, path=config.env.path, options=dict(config.env.options))
    check_task(task)  # a broken task fails here by name, not in an actor an hour later
    model_dir = model_directory(config, task, ranks)
    past = find_resume_state(config, run_dir, ranks)
    controls = _make_controls(config, past)
    lineage = surviving_lineage(past, epoch)
    endpoint = _agree_on_endpoint(run_dir, ranks)
    staleness = _make_staleness(config, past)
    hub_process = None
    if ranks.rank == 0:  # it imports and binds while the networks load here
        hub_process = _start_hub(config, run_dir, ranks, past, epoch, lineage, endpoint, model_dir, staleness.bounds)
        undo.callback(hub_process.abandon)
    objective = _make_objective(config, past, controls, ranks)
    networks = load_networks(config, model_dir, past, ranks, with_critic=objective.has_critic)
    shm = _open_documents(config, run_dir, past) if ranks.rank == 0 else None
    if shm is not None:
        undo.callback(shm.close)
    vocab_size = policy_vocab_size(model_dir)
    run = Run(
        config=config, run_dir=run_dir, run_id=past.run_id, learner_epoch=epoch, lineage=lineage, version=past.version,
        ranks=ranks, policy=networks.policy, optimizer=networks.optimizer, critic=networks.critic,
        reference=networks.reference, proximal=networks.proximal, controls=controls, staleness=staleness,
        schedule=make_schedule(config.policy.optimizer, config.policy.scheduler, num_steps=config.trainer.num_steps),
        objective=objective, publisher=_make_publisher(config, networks.policy, ranks, shm, claim),
        prober=_make_prober(config, networks.policy, model_dir, ranks), stop=stop, claim=claim,
        hub=_link_to_hub(config, endpoint, past, ranks, hub_process, stop), hub_process=hub_process, shm=shm,
        reader=TrajectoryReader(vocab_size=vocab_size), model_dir=model_dir,
        saved_version=past.version if past.checkpoint is not None else -1,
    )
    if ranks.rank == 0:
        _finish_rank_zero(run, model_dir, past)
    return run


def _make_objective(config: Config, past: ResumeState, controls: LossWeights, ranks: Ranks) -> Objective:
    return Objective(
        config.advantage, config.loss, regularizers=Regularizers(config.kl, config.constraint, config.loss, controls),
        max_new_tokens=answer_limit(config), max_lag=largest_max_lag(config), ranks=ranks,
        reward_rules=_make_reward_rules(config, past), filter_truncated=config.filter.truncated,
    )


def _open_documents(config: Config, run_dir: Path, past: ResumeState) -> ShmPublisher:
    """Where published weights lie, freed of what a dead predecessor left."""
    directory = document_directory(past.run_id, run_dir)
    clean_stale(directory, past.run_id)
    return ShmPublisher(directory, past.run_id, config.publish.num_keep_versions, fallback=run_dir / "weights")


def _make_publisher(
    config: Config, policy: Policy, ranks: Ranks, shm: ShmPublisher | None, claim: RunLock | None
) -> Publisher:
    return Publisher(
        policy_parameters(policy.model), wire_dtype=wire_dtype(config.publish.dtype, ranks.device),
        bucket_bytes=config.publish.bucket_bytes, shm=shm, rank=ranks.rank, fence=claim.check if claim else None,
        fold=bool(device_transports(config.publish.transports, setting="publish.transports")),
    )


def _make_prober(config: Config, policy: Policy, model_dir: Path, ranks: Ranks) -> Prober:
    longest = config.rollout.max_prompt_tokens + response_limit(config)  # the actors' engines hold that much
    return Prober(
        policy, probe_tokens(model_dir, policy_vocab_size(model_dir), longest), every=config.publish.probe_every,
        tolerance=config.publish.probe_tolerance, device=ranks.device,
    )


def _link_to_hub(
    config: Config, endpoint: str, past: ResumeState, ranks: Ranks, hub_process: HubProcess | None, stop: StopFlag
) -> HubLink:
    return HubLink(
        endpoint, rank=ranks.rank, world=ranks.world, version=past.version,
        check_hub=hub_process.check if hub_process else lambda: None, stop_requested=stop,
        stall_report_s=config.learner.stall_report_s, stall_fail_s=config.learner.stall_fail_s,
    )


def _make_staleness(config: Config, past: ResumeState) -> StalenessControl:
    """Lead, bound and drift, as the predecessor left them."""
    staleness = StalenessControl(config)
    if "staleness" in past.controls:
        staleness.restore(past.controls["staleness"])
    return staleness


def _make_reward_rules(config: Config, past: ResumeState) -> RewardRules:
    rules = RewardRules(config.objectives, config.overlong, max_tokens=answer_limit(config))
    rules.restore(past.controls.get("scores", {}))
    return rules


def _make_controls(config: Config, past: ResumeState) -> LossWeights:
    """Weights of KL, entropy and constraints, as the predecessor left them."""
    controls = LossWeights(config.kl, config.entropy, config.constraint, config.loss, version=past.version)
    if "loss" in past.controls:
        controls.restore(past.controls["loss"])
    return controls


def _finish_rank_zero(run: Run, model_dir: Path, past: ResumeState) -> None:
    assets = run.run_dir / "assets.msgpack"
    assets.write_bytes(pack_assets(model_dir))
    run.assets_path = str(assets)
    run.hub.wait_until_up()
    dtype = compute_dtype(run.config.policy.dtype, run.ranks.device)
    run.recorder = Recorder(
        run.config, run.run_dir, run.run_id, resume_step=past.version, wall_s=past.wall_s,
        trained_tokens=past.trained_tokens, device=run.ranks.device.type, dtype=str(dtype).removeprefix("torch."),
    )
    _announce(run)


def _announce(run: Run) -> None:
    """What a person wants to know before the first step: where actors connect, and how old data may get."""
    connect = json.loads((run.run_dir / "hub.json").read_text())["connect"]
    rollout, staleness = run.config.rollout, run.config.staleness
    log.info("hub listens at %s: start actors with  python -m actors connect=%s", connect, connect)
    every = steps_between_checkpoints(run.config)
    if every != run.config.checkpoint.every_steps:
        log.info("checkpoints every %d steps instead of %d: what is trained in between must fit into one actor's "
                 "outbox", every, run.config.checkpoint.every_steps)
    log.info(
        "run %s, epoch %d, version %d of %d; B=%d groups x G=%d, eta=%d%s, window=%d: head lag is at most %d",
        run.run_id, run.learner_epoch, run.version, run.config.trainer.num_steps, rollout.num_prompts_per_step,
        rollout.num_responses_per_prompt, staleness.eta,
        " at first" if staleness.adaptive.enabled else "", lookahead(run.config), largest_max_lag(run.config),
    )


def _start_hub(
    config: Config, run_dir: Path, ranks: Ranks, past: ResumeState, epoch: int, lineage: tuple[Lineage, ...],
    endpoint: str, model_dir: Path, bounds: tuple[int, int] | None,
) -> HubProcess:
    ledger = past.checkpoint.path / "ledger.bin" if past.checkpoint is not None else None
    return HubProcess(hub_settings(
        config, run_id=past.run_id, run_dir=run_dir, learner_epoch=epoch, version=past.version,
        lineage=lineage[:-1], dp_ranks=ranks.mesh.dp_ranks,
        bind=same_address(config.hub.bind, run_dir, resume=config.checkpoint.resume),
        rank_endpoint=endpoint, shm_dir=document_directory(past.run_id, run_dir),
        vocab_size=policy_vocab_size(model_dir), restore_path=ledger, bounds=bounds, device=str(ranks.device),
    ))


def _agree_on_endpoint(run_dir: Path, ranks: Ranks) -> str:
    """Rank 0 chooses the socket, the others read it from the run directory."""
    note = run_dir / "ranks.json"
    if ranks.rank == 0:
        note.write_text(json.dumps({"endpoint": private_rank_endpoint()}))
    ranks.barrier()
    return str(json.loads(note.read_text())["endpoint"])


def same_address(bind: str, run_dir: Path, *, resume: bool) -> str:
    """A resumed learner that may take any port takes its predecessor's, where its actors still knock."""
    note = run_dir / "hub.json"
    if resume and bind.endswith(":0") and note.exists():
        return str(json.loads(note.read_text())["connect"])
    return bind


def tear_down(run: Run) -> None:
    """Sockets, shared memory, process group; safe after any failure."""
    run.hub.close()
    if run.hub_process is not None:
        run.hub_process.abandon()
    if run.shm is not None:
        run.shm.close()
    if run.claim is not None:
        run.claim.release()
    run.ranks.close()
    if run.ranks.rank == 0:
        (run.run_dir / "ranks.json").unlink(missing_ok=True)
    logging.getLogger("streamrl").debug("process %d is done", os.getpid())
