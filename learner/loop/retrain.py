"""Training again on the batches of a run's log, and the comparison with the weights that the run had.

It decides nothing by a clock: the seconds that steered the run are taken from the log. With the same settings, ranks,
threads and libraries the weights of every version are those of the run, bit by bit, on a CPU in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from learner.loop.steering import Steering
from learner.objective.plan import BatchPlan
from learner.objective.statistics import StepStatistics, TrainedBatch
from learner.publish.publisher import WeightDigests
from learner.sources.batch import Batch
from learner.sources.log import Logged, LogSource
from learner.trainer import Trainer
from streamrl.messages import Manifest


@dataclass(frozen=True, slots=True)
class Retrained:
    """A batch of the log, trained again.

    Attributes:
        trained: None if it cannot be trained on, for `cause`.
        versions: those that it made and that the run published -> how its weights differ, "" where they are equal.
    """

    logged: Logged
    batch: Batch
    trained: TrainedBatch | None
    version: int
    cause: str = ""
    versions: Mapping[int, str] = field(default_factory=dict)


class Retraining(Steering):
    """Steers a trainer by the times in a log, and compares the versions between the steps of a batch."""

    def __init__(
        self, steering: Steering, source: LogSource, compare: Callable[[int], None],
        on_planned: Callable[[BatchPlan, StepStatistics], None] | None,
    ) -> None:
        super().__init__(steering.staleness, steering.ranks, steering.clock)
        self._source, self._compare, self._on_planned = source, compare, on_planned

    def planned(self, plan: BatchPlan, statistics: StepStatistics) -> None:
        if self._on_planned is not None:
            self._on_planned(plan, statistics)

    def stepped(self, version: int) -> None:
        self._compare(version)

    def _measure(self) -> float:
        logged = self._source.batch
        assert logged is not None
        return super()._measure() if logged.step is None else logged.step.seconds


def retrain(
    trainer: Trainer, source: LogSource, steering: Steering, *, published: Mapping[int, Manifest],
    digests: WeightDigests, on_planned: Callable[[BatchPlan, StepStatistics], None] | None = None,
) -> Iterator[Retrained]:
    """Train on every batch of a log, from the trainer's version on; each is yielded once it is trained. Collective.

    Args:
        steering: of the run, with the state that it had at that version.
        published: the run's versions; those that batches lead to are compared by their digests, on rank 0.
    Raises:
        LogError: the next batch is not for the trainer's version, or it cannot be read.
    """
    found: dict[int, str] = {}

    def compare(version: int) -> None:
        manifest = published.get(version)
        if trainer.ranks.maximum(float(manifest is not None)):
            found[version] = digests.difference(version, manifest)

    before, trainer.callbacks = trainer.callbacks, Retraining(steering, source, compare, on_planned)
    try:
        while (batch := source.next_batch(trainer.version)) is not None:
            assert source.batch is not None
            found.clear()
            if source.cause:
                yield Retrained(source.batch, batch, None, trainer.version, source.cause)
                continue
            trained = trainer.train_batch(batch.rows, batch.plan, lag_policy=steering.staleness.lag_policy)
            if not trained.result.skipped:
                compare(trainer.version)
            yield Retrained(source.batch, batch, trained, trainer.version, versions=dict(found))
    finally:
        trainer.callbacks = before
