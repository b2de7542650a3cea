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
from learner.checkpoint import Checkpoint
from learner.critic import Critic
from learner.critic_network import build_critic
from learner.hub_config import hub_settings, response_limit, steps_between_checkpoints
from learner.hub_link import HubLink
from learner.hub_process import HubProcess, private_rank_endpoint
from learner.kl_control import LossControls
from learner.kl_options import check_regularisers
from learner.model import Policy, load_policy
from learner.objective import Objective
from learner.optimizer import make_optimizer, make_schedule
from learner.past import Past, find_past, surviving
from learner.probe import Prober, probe_tokens
from learner.publish import Publisher, policy_parameters
from learner.ranks import Ranks
from learner.recorder import Recorder
from learner.reference import FrozenPolicy, load_reference
from learner.regularisers import Regularisers
from learner.run import Run
from learner.run_dir import claim_run_dir
from learner.scores import ScoreRules
from learner.staleness_control import StalenessControl
from learner.starting_model import compute_dtype, model_directory, policy_vocab_size, wire_dtype
from learner.stop_flag import StopFlag
from learner.trajectories import TrajectoryReader
from streamrl.config.checks import largest_max_lag, lookahead
from streamrl.config.schema import Config
from streamrl.messages import Lineage
from streamrl.weights.assets import pack_assets
from streamrl.weights.cuda_memory import require_ipc
from streamrl.weights.nccl import require_nccl
from streamrl.weights.rundir import clean_stale, document_directory
from streamrl.weights.shm import ShmPublisher

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
    """Refuse a way of moving weights that this machine cannot go. Raises ConfigError."""
    for name, require in (("ipc", require_ipc), ("nccl", require_nccl)):
        if name in transports:
            require(str(device))


def _build(config: Config, run_dir: Path, stop: StopFlag, ranks: Ranks, undo: ExitStack) -> Run:
    check_transports(config.publish.transports, ranks.device)
    torch.manual_seed(config.run.seed)
    if config.env.path is not None:  # actors read it too, perhaps from another working directory
        config.env.path = str(Path(config.env.path).resolve())
    claim = claim_run_dir(run_dir) if ranks.rank == 0 else None
    epoch = int(ranks.maximum(float(claim.learner_epoch if claim else 0)))
    task = load_task(config.env.name, path=config.env.path, options=dict(config.env.options))
    check_task(task)  # a broken task fails here by name, not in an actor an hour later
    model_dir = model_directory(config, task, ranks)
    past = find_past(config, run_dir, ranks)
    controls = _make_controls(config, past)
    lineage = surviving(past, epoch)
    first = ranks.rank == 0
    endpoint = _agree_on_endpoint(run_dir, ranks)
    shm_dir = document_directory(past.run_id, run_dir)
    staleness = _make_staleness(config, past)
    hub_process = None
    if first:
        hub_process = _start_hub(
            config, run_dir, ranks, past, epoch, lineage, endpoint, shm_dir, model_dir, staleness.bounds
        )
        undo.callback(hub_process.abandon)
    objective = Objective(
        config.advantage, config.loss, regularisers=Regularisers(config.kl, config.constraint, config.loss, controls),
        max_new_tokens=response_limit(config), max_lag=largest_max_lag(config), ranks=ranks,
        score_rules=_make_score_rules(config, past), filter_truncated=config.filter.truncated,
    )
    dtype = compute_dtype(config.policy.dtype, ranks.device)
    policy = _load(config, model_dir, dtype, ranks)
    optimizer = make_optimizer(policy, config.policy.optimizer)
    critic = _make_critic(config, policy, model_dir, dtype, ranks) if objective.has_critic else None
    reference = load_reference(config, model_dir, policy, ranks, dtype=dtype)
    proximal = None
    if config.loss.anchor == "ewma":
        proximal = FrozenPolicy(_load(config, model_dir, dtype, ranks), name="ewma")
    if past.checkpoint is not None:
        past.checkpoint.restore(policy, optimizer, ranks)
        _restore_beside(past.checkpoint, policy, critic, proximal)
        if reference is not None and config.reference.sync_every_steps:
            reference.restore(past.checkpoint.shards())  # not in the checkpoint of a run that only now lets it move
    shm = None
    if first:
        clean_stale(shm_dir, past.run_id)
        shm = ShmPublisher(
            shm_dir, past.run_id, config.publish.num_keep_versions, fallback=run_dir / "weights"
        )
        undo.callback(shm.close)
    publisher = Publisher(
        policy_parameters(policy.model), wire_dtype=wire_dtype(config.publish.dtype, ranks.device),
        bucket_bytes=config.publish.bucket_bytes, shm=shm, rank=ranks.rank, world=ranks.world,
        fence=claim.check if claim else None, fold=bool(set(config.publish.transports) & {"ipc", "nccl"}),
    )
    longest = config.rollout.max_prompt_tokens + response_limit(config)  # the actors' engines hold that much
    prober = Prober(
        policy, probe_tokens(model_dir, policy_vocab_size(model_dir), longest), every=config.publish.probe_every,
        tolerance=config.publish.probe_tolerance, device=ranks.device,
    )
    hub = HubLink(
        endpoint, rank=ranks.rank, world=ranks.world, version=past.version,
        check_hub=hub_process.check if hub_process else lambda: None, stop_requested=stop,
        stall_report_s=config.learner.stall_report_s, stall_fail_s=config.learner.stall_fail_s,
    )
    run = Run(
        config=config, run_dir=run_dir, run_id=past.run_id, learner_epoch=epoch, lineage=lineage, version=past.version,
        ranks=ranks, policy=policy, optimizer=optimizer, critic=critic, proximal=proximal, controls=controls,
        staleness=staleness,
        reference=reference,
        schedule=make_schedule(config.policy.optimizer, config.policy.scheduler, num_steps=config.trainer.num_steps),
        objective=objective, publisher=publisher, prober=prober, hub=hub, stop=stop, claim=claim,
        hub_process=hub_process, shm=shm,
        reader=TrajectoryReader(vocab_size=policy_vocab_size(model_dir)),
        saved_version=past.version if past.checkpoint is not None else -1,
    )
    if first:
        _finish_rank_zero(run, model_dir, past, dtype)
    return run


def _load(config: Config, model_dir: Path, dtype: torch.dtype, ranks: Ranks) -> Policy:
    return load_policy(
        model_dir, dtype=dtype, device=ranks.device, ranks=ranks, chunk_tokens=config.learner.logprob_chunk_tokens,
        gradient_checkpointing=config.policy.gradient_checkpointing,
    )


def _make_staleness(config: Config, past: Past) -> StalenessControl:
    """Lead, bound and drift, as the predecessor left them."""
    staleness = StalenessControl(config)
    if past.checkpoint is not None and "controls" in past.checkpoint.extra:
        staleness.restore(past.checkpoint.extra["controls"]["staleness"])
    return staleness


def _make_score_rules(config: Config, past: Past) -> ScoreRules:
    rules = ScoreRules(config.objectives, config.overlong, max_tokens=response_limit(config))
    if past.checkpoint is not None and "controls" in past.checkpoint.extra:
        rules.restore(past.checkpoint.extra["controls"].get("scores", {}))
    return rules


def _make_controls(config: Config, past: Past) -> LossControls:
    """Weights of KL, entropy and constraints, as the predecessor left them."""
    check_regularisers(
        config.kl, config.reference, config.entropy, config.constraint, config.loss, max_lag=largest_max_lag(config)
    )
    controls = LossControls(config.kl, config.entropy, config.constraint, config.loss, version=past.version)
    if past.checkpoint is not None and "controls" in past.checkpoint.extra:
        controls.restore(past.checkpoint.extra["controls"]["loss"])
    return controls


def _make_critic(config: Config, policy: Policy, model_dir: Path, dtype: torch.dtype, ranks: Ranks) -> Critic:
    return build_critic(
        config.critic, config.advantage.estimator, policy, model_dir, num_steps=config.trainer.num_steps, dtype=dtype,
        ranks=ranks,
    )


def _restore_beside(
    checkpoint: Checkpoint, policy: Policy, critic: Critic | None, proximal: FrozenPolicy | None
) -> None:
    """The networks beside the policy; a run that gained one since the checkpoint starts it afresh, and says so."""
    if critic is not None and not critic.restore(checkpoint.shards()):
        log.warning("%s holds no critic: it starts untrained", checkpoint.path.name)
    if proximal is not None and not proximal.restore(checkpoint.shards()):
        log.warning("%s holds no averaged policy: the average starts at the present one", checkpoint.path.name)
        proximal.sync(policy)


def _finish_rank_zero(run: Run, model_dir: Path, past: Past, dtype: torch.dtype) -> None:
    assets = run.run_dir / "assets.msgpack"
    assets.write_bytes(pack_assets(model_dir))
    run.assets_path = str(assets)
    run.hub.wait_until_up()
    run.recorder = Recorder(
        run.config, run.run_dir, run.run_id, resume_step=past.version, wall_s=past.wall_s,
        trained_tokens=past.trained_tokens, device=run.ranks.device.type, dtype=str(dtype).removeprefix("torch."),
    )
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
    config: Config, run_dir: Path, ranks: Ranks, past: Past, epoch: int, lineage: tuple[Lineage, ...], endpoint: str,
    shm_dir: Path, model_dir: Path, bounds: tuple[int, int] | None,
) -> HubProcess:
    ledger = past.checkpoint.path / "ledger.bin" if past.checkpoint is not None else None
    return HubProcess(hub_settings(
        config, run_id=past.run_id, run_dir=run_dir, learner_epoch=epoch, version=past.version,
        lineage=lineage[:-1], world=ranks.world,
        bind=same_address(config.hub.bind, run_dir, resume=config.checkpoint.resume),
        rank_endpoint=endpoint, shm_dir=shm_dir, vocab_size=policy_vocab_size(model_dir), restore_path=ledger,
        bounds=bounds, device=str(ranks.device),
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
