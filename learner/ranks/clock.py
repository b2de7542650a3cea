"""The seconds that a rank spends in each stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.profiler import record_function

from learner.ranks.activity import Activity

STAGES = (
    "step", "wait", "pack", "score", "forward_backward", "optimizer", "critic", "publish", "checkpoint", "eval"
)
"""Stages of a step: a row of metrics holds the slowest rank's time."""


class StepClock:
    """The seconds of one rank's step by stage, and what the rank does now, for its heartbeats."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._times: dict[str, float] = {}
        self.began = time.monotonic()  # at the start of the step; a lone trainer has no `begin_step`

    def begin_step(self) -> None:
        """The next step starts now; a stage that was timed since the last row counts for it."""
        self.began = time.monotonic()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of a block to a stage of this step; it is what this rank does meanwhile."""
        began = time.monotonic()
        try:
            with self._activity.in_phase(stage), record_function(f"streamrl: {stage}"):
                yield
        finally:
            self._times[stage] = self._times.get(stage, 0.0) + time.monotonic() - began

    def take(self) -> Mapping[str, float]:
        """`time/<stage>_s` of the step that ends now; what follows, as a checkpoint, counts for the next."""
        times, self._times = {**self._times, "step": time.monotonic() - self.began}, {}
        return {f"time/{stage}_s": times.get(stage, 0.0) for stage in STAGES}
