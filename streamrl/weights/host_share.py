"""Actors of one host fetch a version once: the first one pulls it and leaves it in shared memory, the others map it.

Nobody is in charge. A version is a file, `w.{epoch}.{version}.{root}`, that appears complete by a rename and never
changes; who makes it is decided by a `flock` that the kernel drops when its holder dies, so the next in line takes over
without asking. Whoever maps the file digests every bucket before it believes it, as with any other transport.

    members.lock                    held shared by every living member; who gets it alone may remove the directory
    w.{epoch}.{version}.{root}.lock held by the member that pulls; it counts in it, so that others see it breathe
    w.{epoch}.{version}.{root}.tmp  what it writes, then renames
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, VersionRef
from streamrl.weights.document import Document, NotAvailable, Superseded
from streamrl.weights.rundir import SHM_ROOT
from streamrl.weights.writer import DocumentWriter, Slot

log = logging.getLogger(__name__)

MEMBERS = "members.lock"
KEEP = 2
"""Versions that stay: the newest, and the one before it, which somebody may be mapping now."""
BREATH_S = 0.5
STOPPED_S = 5.0
"""A puller that has not counted for so long is stopped or stuck: whoever waits for it pulls for itself."""
_POLL_S = 0.02
_NAME = re.compile(r"w\.(\d+)\.(\d+)\.[0-9a-f]{16}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Pulled = tuple[Document, float, float]


class Puller(Protocol):
    """A receiver that brings documents from afar (`streamrl.weights.source.Receiver`)."""

    source: InstallSource

    def receive(
        self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
    ) -> Pulled: ...


class HostShare:
    """This process's membership; the directory is made by the first version that is pulled.

    Args:
        run_id: members of another run never meet.
        root: shared memory; another directory in tests.
    Raises:
        WeightsError: the run id cannot name a directory.
    """

    def __init__(self, run_id: str, root: Path = SHM_ROOT) -> None:
        if not _RUN_ID.fullmatch(run_id):
            raise WeightsError(f"run_id {run_id!r} cannot name a directory: use up to 64 of A-Z a-z 0-9 . _ -")
        self._root = root
        self.path = root / f"streamrl.share.{os.getuid()}.{run_id}"
        self._membership: int | None = None
        self._lock = threading.Lock()
        self._broken = False

    def join(self) -> bool:
        """Become a member; False if this host has no shared memory to share."""
        with self._lock:
            if self._membership is None and not self._broken:
                try:
                    _remove_dead(self._root)
                    self._membership = _join(self.path)
                except OSError as error:
                    self._broken = True
                    log.info("weights are not shared on this host: %s", error)
            return self._membership is not None

    def close(self) -> None:
        """Leave; the last member removes the directory. May be called twice."""
        with self._lock:
            fd, self._membership, self._broken = self._membership, None, True
        if fd is not None:
            _leave(self.path, fd)

    def document_path(self, manifest: Manifest) -> Path:
        """Where this very version of this very run lies, once somebody has it."""
        ref = manifest.ref
        return self.path / f"w.{ref.learner_epoch}.{ref.version}.{manifest.root[:8].hex()}"


class SharedReceiver:
    """A puller that looks at the host's share first, and leaves there what it had to pull.

    Attributes:
        source: SHM if another process had pulled it, else the puller's own.
    """

    def __init__(self, share: HostShare, puller: Puller) -> None:
        self._share, self._puller = share, puller
        self.source = puller.source

    def receive(
        self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
    ) -> Pulled:
        """As every receiver; waits while another process of this host pulls the same version."""
        if not self._share.join():
            return self._pull(manifest, layout, cancelled, deadline)
        path, began = self._share.document_path(manifest), time.monotonic()
        watch = _Watch(path)
        while True:
            if (found := _map(path, manifest, layout, began)) is not None:
                self.source = InstallSource.SHM
                return found
            with _turn(path) as mine:
                if mine is not None:
                    if path.exists():
                        continue  # it came between the look and the lock
                    return self._pull_and_leave(mine, path, manifest, layout, cancelled, deadline)
            if watch.stopped():
                log.warning("the process of this host that pulls version %s has stopped: pulling it here, too",
                            manifest.ref)
                return self._pull(manifest, layout, cancelled, deadline)
            if cancelled.wait(_POLL_S):
                raise Superseded(f"version {manifest.ref}: abandoned for a newer version")
            if time.monotonic() >= deadline:
                raise NotAvailable(f"version {manifest.ref}: another process of this host did not bring it in time")

    def _pull(self, manifest: Manifest, layout: Layout, cancelled: threading.Event, deadline: float) -> Pulled:
        pulled = self._puller.receive(manifest, layout, cancelled=cancelled, deadline=deadline)
        self.source = self._puller.source
        return pulled

    def _pull_and_leave(
        self, lock: int, path: Path, manifest: Manifest, layout: Layout, cancelled: threading.Event, deadline: float
    ) -> Pulled:
        with _breathing(lock):
            document, transfer_s, verify_s = self._pull(manifest, layout, cancelled, deadline)
            try:
                _write(document, path)
            except OSError as error:
                log.warning("no room in %s to share version %s: %s", path.parent, manifest.ref, error)
                return document, transfer_s, verify_s
            _retire(path.parent)
            # From here on the shared pages are used, and the private copy is given back.
            shared = _map(path, manifest, layout, time.monotonic())
        return (shared[0] if shared is not None else document), transfer_s, verify_s


def _write(document: Document, path: Path) -> None:
    slot = Slot(path.with_name(f"{path.name}.tmp"), document.nbytes)
    writer = DocumentWriter(slot, path, document.manifest.ref, document.layout, lambda done: done.drop())
    try:
        writer.append(document.view(0, document.nbytes))
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _map(path: Path, manifest: Manifest, layout: Layout, began: float) -> Pulled | None:
    """The verified document in this file; None if there is none. A file with other bytes is removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        document = Document.map_open_file(fd, manifest, layout)
        mapped = time.monotonic()
        return document.verify(), mapped - began, time.monotonic() - mapped
    except (WeightsError, OSError, ValueError) as error:
        log.warning("%s is not version %s and is removed: %s", path, manifest.ref, error)
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(fd)


# --- locks ---------------------------------------------------------------------------------------------------------


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
def _turn(path: Path) -> Iterator[int | None]:
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
def _breathing(lock: int) -> Iterator[None]:
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


class _Watch:
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


def _join(path: Path) -> int:
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


def _leave(path: Path, fd: int) -> None:
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


def _remove_dead(root: Path) -> None:
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


def _retire(path: Path) -> None:
    """Remove all but the newest versions; mappings survive it."""
    found: dict[VersionRef, list[Path]] = {}
    for entry in path.iterdir():
        if (match := _NAME.match(entry.name)) is not None:
            found.setdefault(VersionRef(int(match[1]), int(match[2])), []).append(entry)
    for ref in sorted(found)[:-KEEP]:
        for entry in found[ref]:
            entry.unlink(missing_ok=True)
