"""The schedule and the contents of a run's checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from learner.checkpoint.retries import SaveRetries
from learner.checkpoint.saving import Saving
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks


class Checkpoints:
    """The checkpoints of one run; collective calls.

    Args:
        every_s: seconds between two; 0 never for the time.
        every_steps: batches between two; 0 never for their number.
        steps_per_batch: by which versions count one batch.
        tensors: what training changes, when it is called.
        remembered: what a resumed run must know beside the tensors.
    """

    def __init__(
        self, saving: Saving, retries: SaveRetries, ranks: Ranks, clock: StepClock, *, every_s: float,
        every_steps: int, steps_per_batch: int, tensors: Callable[[], Iterable[tuple[str, Tensor]]],
        remembered: Callable[[], dict[str, Any]],
    ) -> None:
        self.saving, self._retries, self._ranks, self._clock = saving, retries, ranks, clock
        self._every_s, self._every_steps, self._steps_per_batch = every_s, every_steps, steps_per_batch
        self._saved_at = time.monotonic()
        self._tensors, self._remembered = tensors, remembered

    def save_if_due(self, version: int) -> None:
        """Write one every so many batches, or so much time; one that failed is tried again after a while."""
        if self._retries.due(self._now) if self._retries.pending else self._due(version):
            self._saved_at = time.monotonic()
            self.save(version)

    def _due(self, version: int) -> bool:
        step = version // self._steps_per_batch
        if self._every_steps and step % self._every_steps == 0:
            return True
        return self._every_s > 0 and self._ranks.from_rank_zero(time.monotonic() - self._saved_at) >= self._every_s

    def save(self, version: int, *, last: bool = False) -> None:
        """Model, optimizer, RNG and the ledger in one checkpoint.

        It may return while that is being written (`saving.settle` waits). One that fails is tried again after later
        steps, at once if it is the `last`. Raises CheckpointError after checkpoint.grace_s.
        """
        if version == self.saving.version:
            return
        self._retries.write(lambda: self._save(version, last), self._now, waits=last)

    def _save(self, version: int, last: bool) -> bool:
        """Whether a checkpoint came to its end."""
        durable = self.saving.durable
        with self._clock.timed("checkpoint"):
            self.saving.save(version, self._tensors(), self._remembered())
            if last:
                self.saving.settle()
        return self.saving.durable > durable

    def _now(self) -> float:
        return self._ranks.from_rank_zero(time.monotonic())  # what follows from it is decided alike on all ranks
