"""The result of training on a batch."""

from __future__ import annotations

from dataclasses import dataclass

from learner.model.critic import CriticResult
from learner.model.gradients import BatchResult
from learner.objective.statistics.step import StepStatistics
from streamrl.metrics.meter import Meter


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """The result of a batch: measurements of all its optimizer steps, their results, the critic's, and statistics."""

    measured: Meter
    result: BatchResult
    statistics: StepStatistics
    critic: CriticResult | None = None
