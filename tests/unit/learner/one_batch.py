"""One batch through the objective as the trainer takes it, for tests that look at single passes and losses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from learner.data.packing import MicroBatch
from learner.data.trajectories import Trajectory
from learner.model.policy import Policy
from learner.objective.loss import micro_batch_loss
from learner.objective.objective import Objective
from learner.objective.plan import BatchPlan
from learner.objective.scoring_pass import score_batch, with_outputs
from learner.objective.statistics import StepStatistics
from learner.objective.token_batch import LagPolicy, PassOutputs
from learner.ranks.mesh import Ranks
from learner.trainer import forward_backward
from streamrl.messages import PlanRow
from streamrl.metrics.meter import Meter


class OneBatch:
    """Plan, scoring pass, losses and statistics of the first optimizer step of a batch."""

    def __init__(
        self, objective: Objective, rows: Sequence[Trajectory], plan: Sequence[PlanRow], *, version: int = 5,
        ranks: Ranks | None = None, lag_policy: LagPolicy | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.plan = BatchPlan.from_batch(
            objective, rows, plan, version=version, ranks=self.ranks, lag_policy=lag_policy
        )
        self.statistics = StepStatistics(self.plan, self.ranks)
        self._observed: list[tuple[MicroBatch, PassOutputs]] = []

    def score(self, policy: Policy, micro_batches: Sequence[MicroBatch], **networks) -> None:
        self.plan = score_batch(policy, micro_batches, self.plan, self.ranks, **networks)
        self.statistics.scored(self.plan)

    def observe(self, micro: MicroBatch, outputs: PassOutputs) -> None:
        """Outputs of networks as a test makes them up."""
        self._observed.append((micro, outputs))

    def close_observation(self) -> None:
        self.plan = with_outputs(self.plan, self._observed, self.ranks)
        self.statistics.scored(self.plan)

    def loss(self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return micro_batch_loss(micro, logprobs, entropy, self.plan, note=self.statistics.note)

    def forward_backward(self, policy: Policy, micro: MicroBatch) -> Tensor:
        return forward_backward(policy, micro, self.plan, self.statistics, self.ranks)

    def finish(self) -> Meter:
        return self.statistics.finish()
