"""The directory of one run's documents, and the lock that allows to delete it.

Shared memory outlives processes, so every such directory has an owner: the process that holds an exclusive `flock` on
`owner.lock` inside it. The kernel drops that lock when the owner dies, whatever killed it, and a process that gets it
may clean up; no name, age or process number is ever taken as proof. Nothing is removed without the lock. The cache of
a host has many owners at once: they hold the lock shared, and the last one gets it exclusively.

    RunDirectory     the publisher: takes the lock, removes what a dead owner left, and everything at its end
    remove_run_dir   the hub or a new learner, when the publisher has died: removes everything
    remove_dead      a new learner of any run: the same for runs whose hub has died, too
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from pathlib import Path

from streamrl.errors import RunLockedError, WeightsError

log = logging.getLogger(__name__)

SHM_ROOT = Path("/dev/shm")
PREFIX = "streamrl-"
LOCK_NAME = "owner.lock"
SPARE_NAME = "w.spare.tmp"
_DOCUMENT = re.compile(r"w\.(\d+\.\d+(\.[0-9a-f]{16})?(\.tmp|\.lock)?|spare\.tmp)")
_POLL_S = 0.02


def check_run_id(run_id: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", run_id):
        raise WeightsError(f"run_id {run_id!r} cannot name a directory: use up to 64 of A-Z a-z 0-9 . _ -")


def document_directory(run_id: str, run_folder: str | Path) -> Path:
    """The place of a run's documents: shared memory where this machine has it, else a directory in the run folder."""
    check_run_id(run_id)
    if SHM_ROOT.is_dir() and os.access(SHM_ROOT, os.W_OK | os.X_OK):
        return SHM_ROOT / f"{PREFIX}{run_id}"
    log.warning("%s is not writable: weights go through the run folder %s", SHM_ROOT, run_folder)
    return Path(run_folder) / "weights"


class RunDirectory:
    """A claimed directory, owned until `release` or the end of the process.

    Args:
        run_id: written into the lock file; a directory of another run is refused.
        wait_s: for a predecessor to die or to be cleaned up.
        shared: with other owners, whose documents stay.
    Raises:
        RunLockedError: a living process owns it, or it belongs to another run.
    """

    def __init__(self, path: str | Path, run_id: str, *, wait_s: float = 5.0, shared: bool = False) -> None:
        self.path = Path(path)
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        deadline = time.monotonic() + wait_s
        # Polled, because a blocking flock knows no time-out.
        while (fd := _try_lock(self.path, run_id, how, create=True)) is None:
            if time.monotonic() > deadline:
                raise RunLockedError(
                    f"{self.path} is owned by a living process after {wait_s:g} s: "
                    "stop the other learner of this run, or of a copy of it, which has the same id"
                )
            time.sleep(_POLL_S)
        self._fd: int | None = fd
        if not shared:  # owned alone, so whatever lies here belongs to a predecessor that has died
            _remove_documents(self.path)

    def release(self) -> None:
        """Remove every document, the lock and the directory, unless there are other owners; may be called twice."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
        else:
            _remove_locked(self.path, fd)


def remove_run_dir(path: str | Path, run_id: str, *, wait_s: float = 0.0) -> bool:
    """Remove the directory of a run whose owner is dead, or dies within `wait_s`; True if nothing of it is left."""
    path = Path(path)
    deadline = time.monotonic() + wait_s
    while path.exists():
        fd = _try_lock(path, run_id, fcntl.LOCK_EX, create=False)
        if fd is not None:
            _remove_locked(path, fd)
            return not path.exists()
        with contextlib.suppress(OSError):  # left empty by an owner or cleaner that died beside the lock file
            path.rmdir()
        if time.monotonic() >= deadline:
            return not path.exists()
        time.sleep(_POLL_S)
    return True


def remove_dead(root: Path = SHM_ROOT) -> list[Path]:
    """Remove this user's directories of runs whose owner and hub were both killed; returns them."""
    removed = []
    for path in root.glob(f"{PREFIX}*"):
        try:
            mine = path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
            if mine and remove_run_dir(path, path.name.removeprefix(PREFIX)):
                log.warning("%s was removed: a run that is dead had left it", path)
                removed.append(path)
        except (OSError, RunLockedError) as error:
            log.info("%s is left alone: %s", path, error)
    return removed


def make_private(path: Path) -> None:
    """Make the directory, mode 0700. Raises RunLockedError if it is not this user's, FileNotFoundError in a removal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RunLockedError(f"{path} is not a directory of this user: remove it, or have it removed")


def lock_file(path: Path, how: int = fcntl.LOCK_EX, *, create: bool = True) -> int | None:
    """A descriptor that holds the `flock`; None while another process does; FileNotFoundError without a directory."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        # A cleaner may have unlinked the file between our open and our lock: that lock would be invisible to others.
        if os.fstat(fd).st_ino == os.stat(path).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _try_lock(path: Path, run_id: str, how: int, *, create: bool) -> int | None:
    """A descriptor that owns the directory; None while another process does or, without `create`, if none ever did."""
    try:
        if create:
            make_private(path)
        fd = lock_file(path / LOCK_NAME, how, create=create)
    except FileNotFoundError:
        return None
    if fd is None:
        return None
    owner = os.pread(fd, 256, 0).decode(errors="replace")
    # The lock alone does not tell whose documents these are: its file names the run.
    if owner and owner != run_id:
        os.close(fd)
        raise RunLockedError(f"{path} belongs to run {owner!r}, not to {run_id!r}: it is left alone")
    if not owner:  # written once it is locked, so that two runs cannot both believe that it is theirs
        os.pwrite(fd, run_id.encode(), 0)
    return fd


def _remove_documents(path: Path) -> None:
    for entry in list(path.iterdir()):
        if _DOCUMENT.fullmatch(entry.name):
            entry.unlink(missing_ok=True)


def _remove_locked(path: Path, fd: int) -> None:
    """Remove what we wrote, the lock last, then the directory unless it holds foreign files."""
    try:
        _remove_documents(path)
        # The lock last: until then no other process may take the directory for its own.
        (path / LOCK_NAME).unlink(missing_ok=True)
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s was not removed: %s", path, error)
    finally:
        os.close(fd)
