"""Sources of a learner's batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from learner.data.trajectories import Trajectory
from learner.objective.statistics import TrainedBatch
from streamrl.messages import BatchShare, PlanRow


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of a batch.

    Attributes:
        rows: this rank's trajectories.
        plan: every trajectory of the batch, on any rank.
        share: what the hub sent, where a hub did.
    """

    rows: Sequence[Trajectory]
    plan: Sequence[PlanRow]
    share: BatchShare | None = None


class BatchSource(Protocol):
    """Hands out batches in order; each call is collective over the learner's ranks."""

    def next_batch(self, version: int) -> Batch | None:
        """The batch that is trained at this version; None when there is none any more, or the run is to stop."""

    def commit_batch(self, version: int, trained: TrainedBatch) -> None:
        """The batch handed out last led to this version, which is the same as before if it was skipped."""
