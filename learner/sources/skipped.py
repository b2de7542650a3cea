"""Optimizer steps that failed, counted until the run must end; their batches and causes are in the run's log."""

from __future__ import annotations

import logging
from pathlib import Path

from learner.model.gradients import BatchResult
from streamrl.errors import StreamrlError

log = logging.getLogger("streamrl.learner")

NOT_FINITE = "gradients are not finite"


def why_skipped(result: BatchResult) -> str:
    """Return why optimizer steps of a batch were skipped; "" if none was."""
    num_steps, num_skipped = len(result.steps), result.num_skipped
    if not num_skipped:
        return ""
    return NOT_FINITE + (f" in {num_skipped} of its {num_steps} steps" if num_steps > 1 else "")


class SkippedSteps:
    """Counts optimizer steps that fail.

    Args:
        limit: optimizer steps, or batches that cannot be packed, that may fail before the run ends; each step that
            succeeds takes one back. 0 never ends it.
    """

    def __init__(self, run_dir: Path, *, limit: int) -> None:
        self._limit, self._num_failed = limit, 0
        self._look = f"streamrl stream {run_dir} --kind batch --kind step"

    def count(self, num_failed: int, num_done: int, cause: str) -> None:
        """Optimizer steps of a batch. Raises StreamrlError: too many have failed; on every rank at once."""
        if num_failed:
            log.error("a batch is set aside: %s; see %s", cause, self._look)
        self._num_failed = max(0, self._num_failed + num_failed - num_done)
        if self._limit and num_failed and self._num_failed >= self._limit:
            raise StreamrlError(
                f"{self._num_failed} optimizer steps were skipped (learner.num_max_skipped_steps={self._limit}), the "
                f"last because: {cause}. Look at the batches and their causes with {self._look}, then resume"
            )

    def stepped(self, result: BatchResult) -> None:
        """The optimizer steps of a batch are done or skipped."""
        num_skipped = result.num_skipped
        self.count(num_skipped, len(result.steps) - num_skipped, why_skipped(result))
