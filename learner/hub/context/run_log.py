"""The hub's end of the run's log: the ledger's journal is written, and what is on the disk is durable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.snapshots import read_snapshot
from streamrl.config.schema import StreamConfig, StreamKeep
from streamrl.errors import CheckpointError
from streamrl.stream.records import CheckpointSaved
from streamrl.stream.writer import LogWriter

log = logging.getLogger("streamrl.hub")

TELL_S = 60.0
"""A log that cannot be written is told of this often."""


class RunLog:
    """Writes the journal of a ledger, and removes files of the log that nothing needs any more.

    Args:
        notify: tells a person.
    """

    def __init__(
        self, settings: StreamConfig, run_dir: Path, writer: LogWriter, ledger: Ledger,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._settings, self._run_dir, self._writer, self._ledger = settings, run_dir, writer, ledger
        self.notify = notify
        self._durable = writer.durable
        self._tell_at = 0.0
        self._frozen: dict[int, tuple[int, int]] = {}  # version -> (oldest record needed, first one not in it)

    @property
    def durable(self) -> int:
        """The newest record that is on the disk, as far as the ledger knows."""
        return self._durable

    @property
    def blocked(self) -> bool:
        """Whether nothing can be written now: no new work is given out meanwhile."""
        return bool(self._writer.failure)

    def flush(self, now: float) -> None:
        """Hand the journal to the writer; tell the ledger how far the log is durable. Never waits."""
        for record in self._ledger.journal.take():
            self._writer.append(record)
        durable = self._writer.durable
        if durable > self._durable:
            self._durable = durable
            self._ledger.logged(durable)
        if self.blocked and now >= self._tell_at:
            self._tell_at = now + TELL_S
            self.notify(
                f"the log of the run cannot be written ({self._writer.failure}): actors get no new work until it can; "
                f"make room on the disk of {self._run_dir}"
            )

    def frozen(self, version: int, state: bytes) -> None:
        """Note which records a checkpoint with this ledger needs."""
        self._frozen[version] = _needs(state)

    def saved(self, version: int) -> None:
        """Log that a checkpoint is whole, and remove what no checkpoint needs, as far as the settings ask for it."""
        first, following = self._frozen.pop(version, (0, 0))
        self._ledger.journal.append(CheckpointSaved(version, following))
        if first == 0:
            return
        try:
            self._remove(first)
        except (OSError, CheckpointError) as error:
            log.warning("old files of the log stay: %s", error)

    def _remove(self, first: int) -> None:
        needed = min([first, *(_needs(path.read_bytes())[0] for path in self._run_dir.glob("ckpt-*/ledger.bin"))])
        limit = None if self._settings.keep is StreamKeep.recovery else int(self._settings.max_gb * 1e9)
        num = self._writer.remove_before(needed, to_bytes=limit)
        if num:
            log.info("%d old files of the log were removed (stream.keep, stream.max_gb): a replay begins at record %d",
                     num, needed)

    def close(self) -> None:
        """Write what is left, if that is possible now."""
        for record in self._ledger.journal.take():
            self._writer.append(record)
        self._writer.close()


def _needs(state: bytes) -> tuple[int, int]:
    snapshot = read_snapshot(state)
    return snapshot.first_sequence, snapshot.next_sequence
