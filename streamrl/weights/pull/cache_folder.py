"""The folder of a host's cache: membership, the right to write a version, and cleanup.

All three are `flock`s, which the kernel drops when their holder dies; see `streamrl.weights.pull.host_cache`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from streamrl.messages import VersionRef
from streamrl.weights.shm.directory import lock_file, make_private

MEMBERS = "members.lock"
KEEP = 2
"""Versions that stay: the newest, and the one before it, which another process may be mapping."""
HEARTBEAT_S = 0.5
STOPPED_S = 5.0
"""A puller without a heartbeat for so long is stopped or hung: processes that wait for it pull for themselves."""
_POLL_S = 0.02
_NAME = re.compile(r"w\.(\d+)\.(\d+)\.[0-9a-f]{16}")


def has_room(path: Path, nbytes: int) -> bool:
    """Whether the file system reports so much free space; one without a limit of its own reports nothing."""
    status = os.statvfs(path)
    return not status.f_blocks or status.f_bavail * status.f_frsize >= nbytes


@contextlib.contextmanager
def turn(path: Path) -> Iterator[int | None]:
    """The right to write this document, or None while another process has it; released at the end, or by the kernel."""
    try:
        fd = lock_file(path.with_name(f"{path.name}.lock"))
    except OSError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def heartbeat(lock: int) -> Iterator[None]:
    """Count in the lock file while the work goes on: the heartbeat that `Watch` looks for."""
    done = threading.Event()

    def count() -> None:
        for number in itertools.count(1):
            os.pwrite(lock, f"{os.getpid()} {number}".encode(), 0)
            if done.wait(HEARTBEAT_S):
                return

    thread = threading.Thread(target=count, name="share", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Watch:
    """Looks for the heartbeat of the process that holds a lock, by our own clock."""

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
    """A descriptor that holds shared membership of the directory, made if need be."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # its last member is removing it
            make_private(path)
            if (fd := lock_file(path / MEMBERS, fcntl.LOCK_SH)) is not None:
                return fd
        time.sleep(_POLL_S)


def leave(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # other members remain
    else:
        _remove(path)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Remove what members wrote; only with the membership held exclusively."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.name.startswith("w."):
                entry.unlink(missing_ok=True)
        (path / MEMBERS).unlink(missing_ok=True)
        path.rmdir()


def remove_dead(root: Path) -> None:
    """Remove directories whose members have all died: the lock shows it, not a name or an age."""
    for path in root.glob(f"streamrl.share.{os.getuid()}.*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            if not (path / MEMBERS).exists():
                path.rmdir()  # whose maker died at once; one that lives makes it again
                continue
            if (fd := lock_file(path / MEMBERS)) is not None:
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
