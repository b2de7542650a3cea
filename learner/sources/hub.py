"""Batches from the hub: every group inside the lag bound, and a batch that cannot be trained on set aside."""

from __future__ import annotations

from collections.abc import Callable

from learner.data.trajectories import read_share
from learner.hub_client.link import HubLink
from learner.objective.rewards import RewardRules
from learner.objective.statistics import TrainedBatch
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from learner.sources.batch import Batch
from learner.sources.skipped import SkippedSteps, why_skipped


class HubSource:
    """One rank's source of batches.

    Args:
        skipped: counts batches that cannot be trained on, and ends the run after too many.
        rules: of rewards; a batch whose scores they cannot use is set aside.
        max_tokens: of one micro-batch.
        bounds: (eta, max_lag) that hold from now on, for the hub; None if nothing moves them.
        seconds: since the batch before, as they steered the one trained last.
    """

    def __init__(
        self, hub: HubLink, ranks: Ranks, clock: StepClock, skipped: SkippedSteps, *, max_tokens: int,
        rules: RewardRules | None = None,
        bounds: Callable[[], tuple[int, int] | None] = lambda: None, seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._hub, self._ranks, self._clock = hub, ranks, clock
        self._max_tokens, self._rules, self._bounds = max_tokens, rules, bounds
        self._skipped, self._seconds = skipped, seconds

    def next_batch(self, version: int) -> Batch | None:
        """This rank's share of the next batch; None when the run is to stop.

        A batch that some rank cannot read or pack is set aside, and the one after it is taken.
        """
        while True:
            with self._clock.timed("wait"):
                share = self._hub.next_batch(version)
            if share is None:
                return None
            with self._clock.timed("pack"):
                rows, cause = read_share(
                    share, max_tokens=self._max_tokens, check_rewards=self._rules and self._rules.check
                )
                if not self._ranks.maximum(float(bool(cause))):
                    return Batch(rows, share.plan, share)
            self._set_aside(version, cause or "another rank cannot train on its part")

    def commit_batch(self, version: int, trained: TrainedBatch) -> None:
        """Rank 0 tells the ledger: capacity for the next batch is free; and what its actors are worth."""
        agreements = trained.statistics.agreements.take(self._ranks)
        if self._ranks.rank == 0:
            skipped = trained.result.skipped
            self._hub.trained(
                version, skipped=skipped, reason=why_skipped(trained.result), bounds=self._bounds(),
                agreements=agreements, seconds=self._seconds(), grad_norm=trained.result.grad_norm,
            )

    def _set_aside(self, version: int, cause: str) -> None:
        if self._ranks.rank == 0:
            self._hub.trained(version, skipped=True, reason=cause[:512], trained=False)
        self._skipped.count(1, 0, cause)
