"""Everything a training run holds, and the verbs that the loop uses."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from learner.audit.audit import Audit
from learner.checkpoint.retries import SaveRetries
from learner.checkpoint.run_lock import RunLock
from learner.checkpoint.saving import Saving
from learner.checkpoint.shards import training_tensors
from learner.control.staleness import StalenessControl
from learner.data.packing import MicroBatch, pack_minibatches
from learner.data.shares import read_share
from learner.data.trajectories import Trajectory, TrajectoryReader
from learner.hub_client.link import HubLink
from learner.hub_client.process import HubProcess
from learner.hub_client.settings import steps_between_checkpoints, steps_in_outboxes
from learner.model.adapter.base import AdapterOf
from learner.model.critic import Critic, CriticResult
from learner.model.gradients import BatchResult
from learner.model.optimizer import Schedule
from learner.model.paths import compute_dtype, wire_dtype
from learner.model.policy import Policy
from learner.model.reference import FrozenPolicy, sync_if_due
from learner.objective.loss_weights import LossWeights
from learner.objective.objective import Objective
from learner.objective.scoring_pass import score_batch
from learner.publish.probe import Prober
from learner.publish.publishing import Publishing
from learner.publish.rounding import with_wire_precision
from learner.ranks.beats import RankBeats
from learner.ranks.mesh import Ranks
from learner.ranks.stop_flag import StopFlag
from learner.record.process_use import ProcessUse
from learner.record.quarantine import NOT_FINITE, Quarantine
from learner.record.recorder import Recorder
from learner.record.step_samples import StepSamples
from streamrl.config.eval_sets import EvalSet, eval_sets
from streamrl.config.rules import steps_per_batch
from streamrl.config.schema import Config, PublishWhen
from streamrl.errors import TaskError
from streamrl.messages import BatchShare, Lineage, PlanRow, VersionRef
from streamrl.metrics.meter import Meter
from streamrl.weights.shm.transport import ShmPublisher

log = logging.getLogger("streamrl.learner")

TIMES = (
    "step", "wait", "pack", "score", "forward_backward", "optimizer", "critic", "publish", "checkpoint", "eval"
)
"""Stages of a step: a row of metrics holds the slowest rank's time."""


@dataclass
class Run:
    """One learner process's share of a run. Rank 0 alone holds hub process, shared memory and recorder."""

    config: Config
    run_dir: Path
    run_id: str
    learner_epoch: int
    lineage: tuple[Lineage, ...]
    version: int
    ranks: Ranks
    policy: Policy
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    objective: Objective
    publishing: Publishing
    saving: Saving
    hub: HubLink
    beats: RankBeats
    reader: TrajectoryReader
    stop: StopFlag
    samples: StepSamples
    loss_weights: LossWeights
    staleness: StalenessControl
    reference: FrozenPolicy | None = None
    critic: Critic | None = None
    proximal: FrozenPolicy | None = None
    critic_result: CriticResult | None = None
    lock: RunLock | None = None
    hub_process: HubProcess | None = None
    shm: ShmPublisher | None = None
    recorder: Recorder | None = None
    prober: Prober | None = None
    eval_sets: Sequence[EvalSet] = ()
    """Where evaluations get their prompts; by default as the config says."""
    adapter: AdapterOf | None = None
    process_use: ProcessUse = field(init=False)
    quarantine: Quarantine = field(init=False)
    audit: Audit = field(init=False)
    save_retries: SaveRetries = field(init=False)
    model_dir: Path = Path()
    shares_prompts: bool = False
    times: dict[str, float] = field(default_factory=dict)
    _step_began: float = 0.0
    _regulated_at: float = 0.0

    def __post_init__(self) -> None:
        self.process_use = ProcessUse(self.ranks.device)
        limit = self.config.learner.num_max_skipped_steps
        self.quarantine = Quarantine(self.run_dir, self.ranks.rank, limit=limit)
        self.save_retries = SaveRetries(self.config.checkpoint.grace_s)
        self.eval_sets = self.eval_sets or eval_sets(self.config)
        self.audit = Audit(self.policy, self.ranks, self.config, self.with_wire_precision)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of one step, which is one batch; the version counts them."""
        return steps_per_batch(self.config)

    @property
    def step(self) -> int:
        """Batches trained so far."""
        return self.version // self.steps_per_batch

    def remaining_steps(self) -> Iterator[int]:
        """1-based numbers of the steps still to do; a skipped step is tried again with the next batch."""
        while self.step < self.config.trainer.num_steps and not self.config.trainer.eval_only:
            self._step_began = time.monotonic()
            yield self.step + 1

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to this step's `time/<name>_s`; it is what this rank does meanwhile."""
        began = time.monotonic()
        try:
            with self.ranks.activity.in_phase(name):
                yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.monotonic() - began

    # --- one step -----------------------------------------------------------------------------------------------

    def next_batch(self) -> tuple[BatchShare, list[Trajectory]] | None:
        """This rank's share of the next batch, every group inside the lag bound; None when the run is to stop.

        A batch that some rank cannot read or pack is set aside, and the one after it is taken; a collective call.
        """
        while True:
            with self.timed("wait"):
                share = self.hub.next_batch(self.version)
            if share is None:
                return None
            rules = self.objective.reward_rules
            with self.timed("pack"):
                rows, cause = read_share(
                    self.reader, share, learner_epoch=self.learner_epoch, check_rewards=rules and rules.check,
                    max_tokens=self.config.learner.max_tokens_per_device,
                )
                if not self.ranks.maximum(float(bool(cause))):
                    return share, rows
            self._set_aside(share, cause or "another rank cannot train on its part")

    def _set_aside(self, share: BatchShare, cause: str) -> None:
        self.quarantine.keep(share, cause)
        if self.ranks.rank == 0:
            self.hub.trained(self.version, skipped=True, reason=cause[:512])
        self.quarantine.count(1, 0, cause)

    def choose_samples(self, share: BatchShare, rows: Sequence[Trajectory]) -> None:
        """Decide which trajectories of this step are kept to be read."""
        self.samples.choose(rows, share, self.objective)

    def pack(self, rows: Sequence[Trajectory], plan: Sequence[PlanRow]) -> list[list[MicroBatch]]:
        """This rank's micro-batches of each minibatch; a collective call."""
        learner = self.config.learner
        return pack_minibatches(
            rows, plan, learner.max_tokens_per_device, self.ranks, num_minibatches=learner.num_minibatches,
            bootstrap=self.objective.has_critic, places=self.objective.places, measured=self.objective.measured,
            share=self.shares_prompts,
        )

    def check_actors(self, rows: Sequence[Trajectory]) -> None:
        """Score what actors sampled with the version that is audited; a collective call."""
        with self.timed("score"):
            self.audit.score(rows, self.objective.agreements)

    @property
    def warming_up(self) -> bool:
        """Only the critic learns yet."""
        return self.critic is not None and self.step < self.config.critic.num_warmup_steps

    def with_wire_precision(self) -> AbstractContextManager[None]:
        """Inside, the policy holds the values that actors got, where the wire rounds them."""
        device, config = self.ranks.device, self.config
        return with_wire_precision(
            self.policy, compute_dtype=compute_dtype(config.policy.dtype, device),
            wire_dtype=wire_dtype(config.publish.dtype, device),
        )

    def score(self, batch: Sequence[MicroBatch]) -> None:
        """What the objective must know of the whole batch before its first gradient; a collective call."""
        score_batch(
            self.policy, batch, self.objective, critic=self.critic, reference=self.reference, proximal=self.proximal
        )

    def fit_critic(self, batch: Sequence[MicroBatch]) -> None:
        """Fit the critic to the estimator's targets; a collective call."""
        if self.critic is not None:
            self.critic_result = self.critic.fit(batch, self.objective.critic_targets, step=self.step)

    def stepped(self, version: int, *, skipped: bool) -> None:
        """An optimizer step led to this version, and others of its batch follow; a collective call if they publish."""
        if self.config.publish.when is PublishWhen.every_optimizer_step and not skipped:
            self.version = version
            self.publish()

    def advance(self, share: BatchShare, result: BatchResult) -> None:
        """The version goes up by the batch's optimizer steps; a batch with gradients that were not finite is kept.

        If none of its steps had finite gradients, the version stays and the batch is set aside.
        """
        self.quarantine.stepped(share, result)
        if result.skipped:
            return
        self.version = share.version + len(result.steps)
        if self.proximal is not None:
            self.proximal.blend(self.policy, decay=self.config.loss.ewma_decay)
        sync_if_due(self.reference, self.policy, every=self.config.reference.sync_every_steps, step=self.step)
        *earlier, last = self.lineage
        self.lineage = (*earlier, Lineage(last.learner_epoch, last.first, max(last.last, self.version)))

    def regulate(self, meter: Meter, result: BatchResult) -> None:
        """Log what steered this step, and let what it measured steer the next: the lead and the bound on the lag, the
        weights of KL, entropy and constraints. A collective call."""
        now = time.monotonic()
        seconds = self.ranks.maximum(now - (self._regulated_at or self._step_began))
        self._regulated_at = now
        self.staleness.update(meter, grad_norm=result.grad_norm, step_s=seconds)
        self.staleness.add_metrics(meter)
        self.loss_weights.record(meter)
        if not result.skipped and result.lr > 0.0:
            self.loss_weights.update(meter, num_steps=self.step, frozen=self.staleness.frozen)

    def hub_trained(self, result: BatchResult) -> None:
        """Rank 0 tells the ledger: capacity for the next batch is free; and what its actors are worth. Collective."""
        agreements = self.objective.agreements.take(self.ranks)
        if self.ranks.rank == 0:
            reason = NOT_FINITE if result.skipped else ""
            self.hub.trained(
                self.version, skipped=result.skipped, reason=reason, bounds=self.staleness.bounds, agreements=agreements
            )

    # --- publishing and evaluation ------------------------------------------------------------------------------

    def publish_if_due(self) -> None:
        """Publish, unless actors have this version or do as well with the one they have; a collective call.

        The version before is announced first, also where none is due: the ledger takes them in order.
        """
        with self.timed("publish"):
            self.settle_publish()
        asked_for = self._eval_due or self.step == self.config.trainer.num_steps
        if self.staleness.publish_due(self.version, asked_for=asked_for):
            self.publish()

    def publish(self) -> None:
        """Make the current weights available to every actor under the current version; a collective call.

        It may return while they are being written: `settle_publish` waits for that.
        """
        with self.timed("publish"):
            self.settle_publish()
            probe = None
            if self.prober is not None and self.prober.due(self.version):
                with self.with_wire_precision():
                    probe = self.prober.probe_if_due(self.version)
            self.audit.published(self.version)
            self.publishing.stage(VersionRef(self.learner_epoch, self.version), probe)
            if not self.publishing.beside:
                self.settle_publish()

    def settle_publish(self) -> None:
        """Wait until the last version is written and announced; a collective call."""
        if (ref := self.publishing.settle()) is not None:
            self.staleness.published(ref.version)

    def poll(self) -> None:
        """Rank 0 tells the hub what threads beside training have finished; never waits."""
        if self.ranks.rank == 0:
            self.publishing.poll()
            self.saving.poll()

    def evaluate(self, *, wait: bool) -> None:
        """Score held-out prompts with at least the current version; rank 0 asks, actors do it."""
        if self.ranks.rank != 0 or not self.eval_sets:
            return
        for place, one in enumerate(self.eval_sets):
            eval_id, asked = self.version * len(self.eval_sets) + place, one.config.eval
            kept = self.samples.eval_prompts(asked.num_samples)
            self.hub.evaluate(eval_id, self.version, asked.num_samples, kept, asked.num_responses, one.name)
        if wait:
            num_prompts = sum(one.config.eval.num_samples for one in self.eval_sets)
            log.info("evaluating version %d on %d prompts", self.version, num_prompts)
            with self.timed("eval"):
                self.hub.wait_for_evals()
        self._take_evals()

    @property
    def _eval_due(self) -> bool:
        every = self.config.eval.every_steps
        return every > 0 and self.step % every == 0 and self.step < self.config.trainer.num_steps

    def evaluate_if_due(self) -> None:
        """Training does not wait for the answer."""
        if self._eval_due:
            self.evaluate(wait=False)

    def _take_evals(self) -> None:
        if self.recorder is not None:
            settings = {one.name: one.config.eval for one in self.eval_sets}
            for result in self.hub.evals:
                if result.failure:
                    on = f" on {result.dataset}" if result.dataset else ""
                    raise TaskError(f"no prompt of the evaluation of version {result.version}{on} could be scored, "
                                    f"the run stops: {result.failure}")
                self.recorder.evaluated(result, settings[result.dataset])
                self.samples.evaluated(result)
        self.hub.evals.clear()

    # --- checkpoints and records --------------------------------------------------------------------------------

    def save_if_due(self) -> None:
        every = steps_between_checkpoints(self.config)
        if self.save_retries.due(self._now) if self.save_retries.pending else every and self.step % every == 0:
            self.save()

    def _now(self) -> float:
        return self.ranks.from_rank_zero(time.monotonic())  # what follows from it is decided alike on all ranks

    def save(self, *, last: bool = False) -> None:
        """Model, optimizer, RNG and the ledger in one checkpoint; a collective call. Then, and only then, DURABLE.

        It may return while that is being written (`saving.settle` waits). One that fails is tried again after later
        steps, at once if it is the `last` or outboxes are full. Raises CheckpointError after checkpoint.grace_s.
        """
        if self.version == self.saving.version:
            return
        num_unsaved = self.step - max(0, self.saving.durable) // self.steps_per_batch
        waits = last or num_unsaved >= steps_in_outboxes(self.config)
        self.save_retries.write(lambda: self._save(last), self._now, waits=waits)

    def _save(self, last: bool) -> bool:
        """Whether a checkpoint came to its end."""
        durable = self.saving.durable
        with self.timed("checkpoint"):
            moving = self.reference if self.config.reference.sync_every_steps else None
            beside = [network for network in (self.critic, self.proximal, moving) if network is not None]
            also = (pair for one in beside for pair in one.tensors())
            self.saving.save(self.version, training_tensors(self.policy, self.optimizer, also), self._remembered())
            if last:
                self.saving.settle()
        return self.saving.durable > durable

    def _remembered(self) -> dict[str, Any]:
        """What a resumed run must know beside the tensors."""
        recorder = self.recorder
        return {
            "run_id": self.run_id, "learner_epoch": self.learner_epoch, "steps_per_batch": self.steps_per_batch,
            "lineage": [[row.learner_epoch, row.first, row.last] for row in self.lineage],
            "wall_s": recorder.wall_s if recorder else 0.0,
            "trained_tokens": recorder.trained_tokens if recorder else 0,
            "adapter": self.adapter.to_plain() if self.adapter is not None else None,
            "controls": {"loss": self.loss_weights.to_plain(), "staleness": self.staleness.to_json(),
                         "scores": self.objective.reward_rules_state()},
        }

    def record(self, step: int, meter: Meter, result: BatchResult) -> None:
        """One row of metrics and the step's samples; every rank calls it, rank 0 writes."""
        self.samples.keep(step, self.objective, skipped=result.skipped)
        self.times["step"] = time.monotonic() - self._step_began
        measured = {f"time/{name}_s": self.times.get(name, 0.0) for name in TIMES} | self.process_use.sample()
        of_ranks = zip(*self.ranks.gather_world(list(measured.values())), strict=True)
        largest = {key: max(values) for key, values in zip(measured, of_ranks, strict=True)}
        self.times = {}  # a checkpoint, which follows, is reported with the next step
        if self.recorder is None:
            return
        self.hub.poll()
        self._take_evals()
        meter.add_all(largest)
        if self.critic_result is not None:
            meter.add_all({f"critic/{name}": value for name, value in asdict(self.critic_result).items()})
        meter.add_all({
            "policy/grad_norm": result.grad_norm, "policy/lr": result.lr,
            "policy/num_skipped_steps": float(result.num_skipped),
            "hub/num_failed_publishes": float(self.publishing.num_failed),
            "throughput/published_bytes": float(self.publishing.nbytes), "meter/num_nonfinite": 0.0,
        })
        self.recorder.step(step, meter, self.hub.status, version=self.version, epoch=self.learner_epoch)
        self.recorder.samples(step, self.samples.take())
