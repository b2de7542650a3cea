"""The folder of a host's share: who is a member, whose turn it is to write, and what is swept away.

Everything is a `flock`, which the kernel drops when its holder dies; see `streamrl.weights.pull.host_cache`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from streamrl.messages import VersionRef

MEMBERS = "members.lock"
KEEP = 2
"""Versions that stay: the newest, and the one before it, which somebody may be mapping now."""
BREATH_S = 0.5
STOPPED_S = 5.0
"""A puller that has not counted for so long is stopped or stuck: whoever waits for it pulls for itself."""
_POLL_S = 0.02
_NAME = re.compile(r"w\.(\d+)\.(\d+)\.[0-9a-f]{16}")


def has_room(path: Path, nbytes: int) -> bool:
    """Whether the file system has so much left, as far as it says: without a limit of its own it says nothing."""
    status = os.statvfs(path)
    return not status.f_blocks or status.f_bavail * status.f_frsize >= nbytes


def _flock(path: Path, how: int) -> int | None:
    """A descriptor that holds the lock, or None while others do.

    Raises:
        FileNotFoundError: the directory is gone.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == os.stat(path).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass  # unlinked between open and lock: nobody else would see our lock
    os.close(fd)
    return None


@contextlib.contextmanager
def turn(path: Path) -> Iterator[int | None]:
    """The right to make this document, if nobody has it; given back at the end, or by the kernel."""
    try:
        fd = _flock(path.with_name(f"{path.name}.lock"), fcntl.LOCK_EX)
    except OSError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def heartbeat(lock: int) -> Iterator[None]:
    """Count in the lock file while the work goes on."""
    done = threading.Event()

    def breathe() -> None:
        count = 0
        while not done.is_set():
            count += 1
            os.pwrite(lock, f"{os.getpid()} {count}".encode(), 0)
            done.wait(BREATH_S)

    thread = threading.Thread(target=breathe, name="share", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Watch:
    """Has whoever holds the lock counted lately? By our own clock."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}.lock")
        self._seen, self._changed_at = b"", time.monotonic()

    def stopped(self) -> bool:
        with contextlib.suppress(OSError):
            now = self._path.read_bytes()
            if now != self._seen:
                self._seen, self._changed_at = now, time.monotonic()
        return time.monotonic() - self._changed_at > STOPPED_S


def join(path: Path) -> int:
    """Shared membership of the directory, made if need be."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a directory of this user")
        with contextlib.suppress(FileNotFoundError):  # its last member removes it just now
            if (fd := _flock(path / MEMBERS, fcntl.LOCK_SH)) is not None:
                return fd
        time.sleep(_POLL_S)


def leave(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # others are still here
    else:
        _remove(path)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Everything that members wrote; call it with the membership held alone."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.name.startswith("w."):
                entry.unlink(missing_ok=True)
        (path / MEMBERS).unlink(missing_ok=True)
        path.rmdir()


def remove_dead(root: Path) -> None:
    """Directories whose members all died without a word: their lock says so, not their name."""
    for path in root.glob(f"streamrl.share.{os.getuid()}.*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            if not (path / MEMBERS).exists():
                path.rmdir()  # its maker died at once; one that still lives makes it again
                continue
            if (fd := _flock(path / MEMBERS, fcntl.LOCK_EX)) is not None:
                try:
                    _remove(path)
                finally:
                    os.close(fd)


def retire(path: Path) -> None:
    """Remove all but the newest versions; mappings survive it."""
    found: dict[VersionRef, list[Path]] = {}
    for entry in path.iterdir():
        if (match := _NAME.match(entry.name)) is not None:
            found.setdefault(VersionRef(int(match[1]), int(match[2])), []).append(entry)
    for ref in sorted(found)[:-KEEP]:
        for entry in found[ref]:
            entry.unlink(missing_ok=True)
