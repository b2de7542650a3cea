"""Checkpoints of a run: written while training waits, or beside it from a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from learner.checkpoint.checkpoint import write_checkpoint
from learner.checkpoint.run_lock import RunLock
from learner.checkpoint.shards import copied
from learner.ranks.background import Background
from learner.ranks.mesh import Ranks
from streamrl.errors import CheckpointError


class KeepsLedger(Protocol):
    """The hub as a checkpoint needs it: its ledger goes in, and its log may be thinned once that is on the disk."""

    def freeze(self, version: int) -> bytes: ...

    def saved(self, version: int) -> None: ...


class Saving:
    """One learner rank's part in them.

    Args:
        beside: where they are written; None writes them while training waits.
        version: of the newest checkpoint, -1 without one.
    """

    def __init__(
        self, run_dir: Path, hub: KeepsLedger, ranks: Ranks, *, num_keep: int, lock: RunLock | None = None,
        beside: Background[Path] | None = None, version: int = -1,
    ) -> None:
        self._run_dir, self._hub, self._ranks, self._beside = run_dir, hub, ranks, beside
        self._options = {"num_keep": num_keep, "lock": lock}
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
        if self._beside is None:
            write_checkpoint(self._run_dir, version, tensors, self._ranks, **options)
            self._durable(version)
        else:
            copy = copied(tensors, self._ranks)
            self._beside.start(partial(write_checkpoint, self._run_dir, version, copy, **options))
            self._unsaved = version
        self.version = version

    def poll(self) -> None:
        """Tell the hub of a checkpoint that has just been written; never waits."""
        if self._unsaved is not None and self._beside is not None and self._beside.succeeded:
            self.settle()

    def settle(self) -> None:
        """Wait until the last checkpoint is written. Raises as `write_checkpoint`, on every rank."""
        if self._unsaved is not None and self._beside is not None:
            version, self._unsaved = self._unsaved, None
            try:
                self._beside.take()
            except CheckpointError:
                self.version = self.durable
                raise
            self._durable(version)

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def _durable(self, version: int) -> None:
        self.durable = version
        if self._ranks.rank == 0:
            self._hub.saved(version)
