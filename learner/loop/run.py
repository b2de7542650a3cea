"""A training run: its parts, and what it does at fixed places inside a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from learner.audit.audit import Audit
from learner.checkpoint.saving import Checkpoints
from learner.control.staleness import StalenessControl
from learner.hub_client.link import HubLink
from learner.hub_client.process import HubProcess
from learner.hub_client.thread import HubThread
from learner.loop.evaluations import Evaluations
from learner.loop.steering import Steering
from learner.model.adapter.lora import AdapterOf
from learner.model.gradients import BatchResult
from learner.objective.plan import BatchPlan
from learner.objective.statistics import StepStatistics, TrainedBatch
from learner.publish.publishing import Versions
from learner.ranks.beats import RankBeats
from learner.ranks.mesh import Ranks, leave_device
from learner.ranks.stop_flag import StopFlag
from learner.record.process_use import ProcessUse
from learner.record.profile import profiled
from learner.record.recorder import Recorder
from learner.record.step_samples import StepSamples
from learner.sources.batch import Batch, BatchSource
from learner.sources.skipped import SkippedSteps
from learner.trainer import Callbacks, Trainer
from streamrl.config.schema import Config, PublishWhen
from streamrl.messages import Lineage
from streamrl.metrics.meter import Meter


@dataclass
class Run(Callbacks):
    """One learner process's share of a run. Rank 0 alone holds hub process and recorder.

    Attributes:
        lineage: which learner made which versions; the last is this one's.
        resources: what is closed at the end, in the reverse order of its making.
    """

    config: Config
    run_dir: Path
    run_id: str
    learner_epoch: int
    lineage: tuple[Lineage, ...]
    model_dir: Path
    adapter: AdapterOf | None
    trainer: Trainer
    hub: HubLink
    hub_process: HubProcess | HubThread | None
    beats: RankBeats
    stop: StopFlag
    staleness: StalenessControl
    samples: StepSamples
    skipped: SkippedSteps
    audit: Audit
    source: BatchSource
    versions: Versions
    recorder: Recorder | None
    evaluations: Evaluations
    resources: ExitStack
    checkpoints: Checkpoints = field(init=False)
    process_use: ProcessUse = field(init=False)
    steering: Steering = field(init=False)
    eval_lost: bool = False
    """An evaluation of the run before this start ended nowhere."""
    _batch: Batch | None = None

    def __post_init__(self) -> None:
        self.process_use = ProcessUse(self.ranks.device)
        self.steering = Steering(self.staleness, self.ranks, self.trainer.clock)
        self.trainer.callbacks = self

    @property
    def ranks(self) -> Ranks:
        return self.trainer.ranks

    @property
    def version(self) -> int:
        """Optimizer steps done."""
        return self.trainer.version

    @property
    def step(self) -> int:
        """Batches trained so far."""
        return self.trainer.step

    def remaining_steps(self) -> Iterator[int]:
        """1-based numbers of the steps still to do; a skipped step is tried again with the next batch."""
        while self.step < self.config.trainer.num_steps and not self.config.trainer.eval_only:
            self.trainer.clock.begin_step()
            with profiled(self.step + 1, self.config.run.profile_steps, self.run_dir, self.ranks):
                yield self.step + 1

    def train_next_batch(self) -> TrainedBatch | None:
        """Train on the next batch of the source; None when the run is to stop. A collective call."""
        self.versions.supply(self.version)
        self.leave_device()
        self._batch = self.source.next_batch(self.version)
        if self._batch is None:
            return None
        trained = self.trainer.train_batch(self._batch.rows, self._batch.plan, lag_policy=self.staleness.lag_policy)
        *earlier, last = self.lineage
        self.lineage = (*earlier, Lineage(last.learner_epoch, last.first, max(last.last, self.version)))
        return trained

    def leave_device(self) -> None:
        """Before a wait for actors that take turns with this learner: give back what it keeps of the device."""
        if self.config.launch.by_turns:
            leave_device(self.ranks.device)

    def publish_if_due(self) -> None:
        """Publish the new version, unless actors do as well with the one they have; a collective call."""
        last = self.step == self.config.trainer.num_steps
        self.versions.publish_if_due(self.version, asked_for=last or self.evaluations.due(self.step))

    def evaluate_at_start(self) -> None:
        """Evaluate the starting weights, or of a resumed run the version whose evaluation was lost."""
        if self.version == 0 and (self.config.eval.at_start or self.config.trainer.eval_only):
            self.leave_device()
            self.evaluations.start(self.version, wait=True)
        elif self.eval_lost and self.step < self.config.trainer.num_steps and not self.config.trainer.eval_only:
            self.evaluations.start(self.version)  # else it is evaluated at the end, which comes now

    def evaluate_if_due(self) -> None:
        """Evaluate every so many steps; the end of the run has an evaluation of its own."""
        if self.step < self.config.trainer.num_steps and self.evaluations.due(self.step):
            self.evaluations.start(self.version)

    def poll(self) -> None:
        """Rank 0 tells the hub what threads in the background have finished; never waits."""
        if self.ranks.rank == 0:
            self.versions.publishing.poll()
            self.checkpoints.saving.poll()

    # --- inside a batch -----------------------------------------------------------------------------------------

    def planned(self, plan: BatchPlan, statistics: StepStatistics) -> None:
        """Choose trajectories to be read, and score what actors sampled with the version that is audited."""
        if self._batch is not None and self._batch.share is not None:
            self.samples.choose(plan.rows, self._batch.share, statistics)
        with self.trainer.clock.timed("score"):
            self.audit.score(plan.rows, statistics.agreements)

    def queued(self) -> None:
        self.poll()

    def lr_scale(self, measured: Meter) -> float:
        return self.steering.lr_scale(measured)

    def stepped(self, version: int) -> None:
        """Publish between the optimizer steps of a batch, where the settings say so."""
        if self.config.publish.when is PublishWhen.every_optimizer_step:
            self.versions.publish(version)

    def on_batch_trained(self, measured: Meter, result: BatchResult) -> bool:
        """Let what the batch measured steer the lead and the bound on the lag, and log what steered this one.

        Raises StreamrlError: too many optimizer steps were skipped.
        """
        self.skipped.stepped(result)
        return self.steering.on_batch_trained(measured, result)

    # --- checkpoints and records --------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """The state that a resumed run needs, apart from the tensors."""
        recorder, settings = self.recorder, self.trainer.settings
        return {
            "run_id": self.run_id, "learner_epoch": self.learner_epoch, "steps_per_batch": settings.steps_per_batch,
            "lineage": [[row.learner_epoch, row.first, row.last] for row in self.lineage],
            "wall_s": recorder.wall_s if recorder else 0.0,
            "trained_tokens": recorder.trained_tokens if recorder else 0,
            "adapter": self.adapter.to_plain() if self.adapter is not None else None,
            "start_model": str(self.model_dir.resolve()),
            "controls": {**self.trainer.objective.to_plain(), "staleness": self.staleness.to_json()},
        }

    def record(self, step: int, trained: TrainedBatch) -> None:
        """Record a row of metrics and the step's samples; every rank calls it, rank 0 writes."""
        meter, result = trained.measured, trained.result
        self.samples.keep(step, trained.statistics, skipped=result.skipped)
        measured = {**self.trainer.clock.take(), **self.process_use.sample()}
        of_ranks = zip(*self.ranks.gather_world(list(measured.values())), strict=True)
        largest = {key: max(values) for key, values in zip(measured, of_ranks, strict=True)}
        if self.recorder is None:
            return
        self.hub.poll()
        self.evaluations.take()
        meter.add_all(largest)
        if trained.critic is not None:
            meter.add_all({f"critic/{name}": value for name, value in asdict(trained.critic).items()})
        publishing = self.versions.publishing
        meter.add_all({
            "policy/grad_norm": result.grad_norm,
            "policy/lr": result.lr,
            "policy/num_skipped_steps": float(result.num_skipped),
            "hub/num_failed_publishes": float(publishing.num_failed),
            "throughput/published_bytes": float(publishing.nbytes), "meter/num_nonfinite": 0.0,
        })
        if result.cosine is not None:
            meter.add("policy/grad_cosine", result.cosine)
        self.recorder.step(step, meter, self.hub.status, version=self.version, epoch=self.learner_epoch)
        self.recorder.samples(step, self.samples.take())
