"""The staleness control as it steers a trainer."""

from __future__ import annotations

import time

from learner.control.staleness import StalenessControl
from learner.model.gradients import BatchResult
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from learner.trainer import Callbacks
from streamrl.metrics.meter import Meter


class Steering(Callbacks):
    """Lets what each batch measured steer the learning rate, and the lead and the bound on the lag of later ones."""

    def __init__(self, staleness: StalenessControl, ranks: Ranks, clock: StepClock) -> None:
        self.staleness, self.ranks, self.clock = staleness, ranks, clock
        self._steered_at = 0.0
        self.seconds = 0.0
        """Since the batch before, as they steered the last one; the same on all ranks."""

    def lr_scale(self, measured: Meter) -> float:
        return self.staleness.lr_scale(measured)

    def on_batch_trained(self, measured: Meter, result: BatchResult) -> bool:
        """Take the batch in, and add to `measured` what steered it."""
        self.seconds = self._measure()
        self.staleness.update(measured, grad_norm=result.grad_norm, step_s=self.seconds)
        self.staleness.add_metrics(measured)
        return self.staleness.frozen

    def _measure(self) -> float:
        now = time.monotonic()
        seconds = self.ranks.maximum(now - (self._steered_at or self.clock.began))
        self._steered_at = now
        return seconds
