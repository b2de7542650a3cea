"""Retries of a checkpoint that could not be written, until that has failed for too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from streamrl.errors import CheckpointError

log = logging.getLogger("streamrl.learner")

LONGEST_WAIT_S = 30.0


class SaveRetries:
    """Failed attempts in a row; the next one is due after 1, 2, 4 ... seconds. `now` is the same on all ranks.

    Args:
        grace_s: seconds since the first failure after which another one ends the run.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since: float | None = None
        self._wait_s = 1.0
        self._next_at: float | None = None

    @property
    def pending(self) -> bool:
        """Whether the newest attempt has failed."""
        return self._next_at is not None

    def due(self, now: Callable[[], float]) -> bool:
        """Whether a checkpoint that failed is to be tried again."""
        return self._next_at is not None and now() >= self._next_at

    def write(self, write: Callable[[], bool], now: Callable[[], float], *, waits: bool) -> None:
        """Call `write`, which tells whether a checkpoint came to its end; if that `waits`, until it does not fail.

        Raises CheckpointError as `failed`.
        """
        while True:
            try:
                succeeded = write()
            except CheckpointError as error:
                wait_s = self.failed(error, now())
                if not waits:
                    return
                time.sleep(wait_s)
            else:
                self.begun(succeeded=succeeded)
                return

    def failed(self, error: CheckpointError, now: float) -> float:
        """Seconds until the next attempt. Raises the error if it has been failing for `grace_s`."""
        self._since = now if self._since is None else self._since
        left_s = self._since + self._grace_s - now
        if left_s <= 0.0:
            raise CheckpointError(
                f"{error}; none could be written for {now - self._since:.0f} s (checkpoint.grace_s={self._grace_s:g}): "
                "the run ends; remove what fills the disk, then resume from its newest checkpoint"
            ) from error
        wait_s = min(self._wait_s, left_s)
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        self._next_at = now + wait_s
        log.error("%s. It is tried again in %.0f s, and the run ends if that goes on for %.0f s more "
                  "(checkpoint.grace_s)", error, wait_s, left_s)
        return wait_s

    def begun(self, *, succeeded: bool) -> None:
        """An attempt is under way or done, and so is an earlier one if that `succeeded`."""
        self._next_at = None
        if succeeded and self._since is not None:
            log.warning("checkpoints can be written again")
            self._since, self._wait_s = None, 1.0
