"""When a checkpoint that could not be written is tried again, and when that has failed too often."""

from __future__ import annotations

import logging

from streamrl.errors import CheckpointError

log = logging.getLogger("streamrl.learner")


class SaveRetries:
    """Failed attempts in a row; the next one follows after 1, 2, 4 ... steps.

    Args:
        limit: failures in a row that end the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_failed = 0
        self._next_step: int | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint that failed is to be tried again after this step."""
        return self._next_step is not None and step >= self._next_step

    def failed(self, step: int, error: CheckpointError, *, last: bool) -> None:
        """Raises the error if no step follows that could bring another attempt, or too many have failed."""
        self._num_failed += 1
        if last or self._num_failed >= self._limit:
            times = f"; so did {self._num_failed - 1} before it" if self._num_failed > 1 else ""
            raise CheckpointError(
                f"{error}{times}: the run ends; remove what fills the disk, then resume from its newest checkpoint"
            ) from error
        wait = 1 << (self._num_failed - 1)
        self._next_step = step + wait
        log.error("%s. Training goes on: attempt %d of %d (checkpoint.num_max_failures) follows after step %d", error,
                  self._num_failed + 1, self._limit, self._next_step)

    def begun(self, *, succeeded: bool) -> None:
        """An attempt is under way or done, and so is an earlier one if that `succeeded`."""
        self._next_step = None
        if succeeded and self._num_failed:
            log.warning("checkpoints can be written again")
            self._num_failed = 0
