"""One learner per run directory: a lock for this machine, and an epoch that fences across machines.

    LOCK    held with flock while the learner runs
    EPOCH   the newest learner's number; written before this learner is visible to others, never reused

flock may not hold over a network file system, so EPOCH is read before anything becomes visible (a published version,
the LATEST checkpoint): another number there means that a newer learner has taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from streamrl.errors import RunLockedError


@dataclass(frozen=True)
class RunLock:
    """The right to write into a run directory; keep it for the life of the process, `release` at the end."""

    run_dir: Path
    learner_epoch: int
    _lock: IO[bytes] = field(repr=False)

    def is_owner(self) -> bool:
        """Whether no newer learner has taken the run since."""
        return _read_epoch(self.run_dir) == self.learner_epoch

    def check(self) -> None:
        """Raise `RunLockedError` if a newer learner has taken the run: call it before anything becomes visible."""
        if not self.is_owner():
            raise RunLockedError(
                f"{self.run_dir}/EPOCH is {_read_epoch(self.run_dir)}, this learner has epoch {self.learner_epoch}: a "
                "newer learner owns the run; this one must end without writing."
            )

    def release(self) -> None:
        """Release the lock; EPOCH stays."""
        self._lock.close()


def lock_run_dir(run_dir: Path | str) -> RunLock:
    """Make the directory, lock it, and become its newest epoch: 1 + the largest of EPOCH and every checkpoint's.

    Raises RunLockedError: another running learner holds the lock.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = open(run_dir / "LOCK", "ab", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RunLockedError(
            f"{run_dir} belongs to a learner that is still running: stop it first, or choose another run.dir."
        ) from error
    epoch = 1 + max(_read_epoch(run_dir), *_checkpoint_epochs(run_dir), 0)
    write_durably(run_dir / "EPOCH", f"{epoch}\n".encode())
    return RunLock(run_dir, epoch, lock)


def write_durably(path: Path, content: bytes) -> None:
    """Replace the file in one step; it survives a power cut once this returns."""
    fresh = path.with_name(f"{path.name}.tmp")
    with open(fresh, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_epoch(run_dir: Path) -> int:
    try:
        return int((run_dir / "EPOCH").read_text())
    except (FileNotFoundError, ValueError):  # of a damaged file: the checkpoints know the newest epoch, too
        return 0


def _checkpoint_epochs(run_dir: Path) -> list[int]:
    """Epochs that checkpoints name, damaged ones included: a number too high does no harm, a reused one would."""
    found = []
    for path in run_dir.glob("ckpt-*/manifest.json"):
        try:
            found.append(int(json.loads(path.read_bytes())["body"]["extra"].get("learner_epoch", 0)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found
