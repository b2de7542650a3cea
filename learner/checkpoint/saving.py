"""Checkpoints of a run: when they are due, written while training waits or in the background, retried if they fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from learner.checkpoint.checkpoint import write_checkpoint
from learner.checkpoint.run_lock import RunLock
from learner.checkpoint.shards import copied
from learner.ranks.background import Background
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
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


class KeepsLedger(Protocol):
    """The hub as a checkpoint needs it: its ledger goes in, and its log may be thinned once that is on the disk."""

    def freeze(self, version: int) -> bytes: ...

    def saved(self, version: int) -> None: ...


class Saving:
    """A learner rank's part in saving checkpoints.

    Args:
        home: the folder of this run's checkpoints outside the run directory.
        background: where they are written; None writes them while training waits.
        version: of the newest checkpoint, -1 without one.
    """

    def __init__(
        self, run_dir: Path, hub: KeepsLedger, ranks: Ranks, *, num_keep: int, lock: RunLock | None = None,
        home: Path | None = None, background: Background[Path] | None = None, version: int = -1,
    ) -> None:
        self._run_dir, self._hub, self._ranks, self._background = run_dir, hub, ranks, background
        self._options = {"num_keep": num_keep, "lock": lock, "home": home}
        self.version = version
        """Of the newest checkpoint, also while it is being written."""
        self.durable = version
        """The newest that is written to its end, or was restored."""
        self._unsaved: int | None = None

    def save(self, version: int, tensors: Iterable[tuple[str, Tensor]], extra: Mapping[str, Any]) -> None:
        """Begin a checkpoint of this moment, with the ledger in it; a collective call. Raises as `settle`."""
        self.settle()
        blobs = {"ledger": self._hub.freeze(version)} if self._ranks.rank == 0 else {}
        options = {**self._options, "extra": extra, "blobs": blobs}
        if self._background is None:
            write_checkpoint(self._run_dir, version, tensors, self._ranks, **options)
            self._durable(version)
        else:
            copy = copied(tensors, self._ranks)
            self._background.start(partial(write_checkpoint, self._run_dir, version, copy, **options))
            self._unsaved = version
        self.version = version

    def poll(self) -> None:
        """Tell the hub of a checkpoint that has just been written; never waits."""
        if self._unsaved is not None and self._background is not None and self._background.succeeded:
            self.settle()

    def settle(self) -> None:
        """Wait until the last checkpoint is written. Raises as `write_checkpoint`, on every rank."""
        if self._unsaved is not None and self._background is not None:
            version, self._unsaved = self._unsaved, None
            try:
                self._background.take()
            except CheckpointError:
                self.version = self.durable
                raise
            self._durable(version)

    def close(self) -> None:
        if self._background is not None:
            self._background.close()

    def _durable(self, version: int) -> None:
        self.durable = version
        if self._ranks.rank == 0:
            self._hub.saved(version)


class Checkpoints:
    """The checkpoints of one run; collective calls.

    Args:
        every_s: seconds between two; 0 never for the time.
        every_steps: batches between two; 0 never for their number.
        steps_per_batch: by which versions count one batch.
        tensors: what training changes, when it is called.
        remembered: what a resumed run must know in addition to the tensors.
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
