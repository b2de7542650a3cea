"""Batches that could not be trained on: kept in files with the cause of each, and counted until the run must end."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec

from learner.model.gradients import BatchResult
from streamrl.errors import StreamrlError
from streamrl.messages import BatchShare
from streamrl.metrics.files import append_lines, write_atomic

log = logging.getLogger("streamrl.learner")

NOT_FINITE = "gradients are not finite"
CAUSES = "causes.jsonl"
"""One line for each file beside it: its name, and why it is there."""
MAX_FILES = 100
"""Of one rank; what comes later is only counted."""


class Quarantine:
    """`quarantine/` of the run directory, as one rank fills it.

    Args:
        limit: optimizer steps, or batches that cannot be packed, that may fail before the run ends; each step that
            succeeds takes one back. 0 never ends it.
    """

    def __init__(self, run_dir: Path, rank: int, *, limit: int) -> None:
        self._folder, self._rank, self._limit = run_dir / "quarantine", rank, limit
        self._num_failed = 0

    def count(self, num_failed: int, num_done: int, cause: str) -> None:
        """Optimizer steps of a batch. Raises StreamrlError: too many have failed; on every rank at once."""
        self._num_failed = max(0, self._num_failed + num_failed - num_done)
        if self._limit and num_failed and self._num_failed >= self._limit:
            raise StreamrlError(
                f"{self._num_failed} optimizer steps were skipped (learner.num_max_skipped_steps={self._limit}), the "
                f"last because: {cause}. Look at the batches and their causes in {self._folder}, then resume"
            )

    def stepped(self, share: BatchShare, result: BatchResult) -> None:
        """The optimizer steps of a batch are done or skipped: keep it if one was skipped, then `count` them."""
        num_steps, num_skipped = len(result.steps), result.num_skipped
        if num_skipped:
            self.keep(share, NOT_FINITE + (f" in {num_skipped} of its {num_steps} steps" if num_steps > 1 else ""))
        self.count(num_skipped, num_steps - num_skipped, NOT_FINITE)

    def keep(self, share: BatchShare, cause: str) -> None:
        """Write this rank's share of a batch beside those that are there, and why; a full disk costs the file only."""
        try:
            path = self._write(share)
            line = json.dumps({"file": path.name if path else None, "cause": cause})
            append_lines(self._folder / CAUSES, line.encode() + b"\n")
        except OSError as error:
            log.error("a batch is set aside: %s; it could not be kept in %s: %s", cause, self._folder, error)
            return
        log.error("a batch is set aside: %s; it is kept in %s", cause, path or f"no file: {MAX_FILES} are there")

    def _write(self, share: BatchShare) -> Path | None:
        self._folder.mkdir(exist_ok=True)
        num = sum(1 for _ in self._folder.glob(f"*-rank-{self._rank}.msgpack"))
        if num >= MAX_FILES:
            return None
        # The version stays where a batch was skipped, so that it names no file alone; nor does a resumed run overwrite.
        path = self._folder / f"batch-{num:03d}-version-{share.version}-rank-{self._rank}.msgpack"
        write_atomic(path, msgspec.msgpack.encode(share))
        return path
