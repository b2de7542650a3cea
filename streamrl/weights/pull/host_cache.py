"""Actors of one host fetch a version once: the first one pulls it and leaves it in shared memory, the others map it.

There is no coordinator. A version is a file, `w.{epoch}.{version}.{root}`, that appears complete by a rename and never
changes. A `flock`, which the kernel drops when its holder dies, decides which process writes it, so another one takes
over at once. A process that maps the file digests every bucket, as with any other transport.

    members.lock                    held shared by every living member; held exclusively to remove the directory
    w.{epoch}.{version}.{root}.lock held by the member that pulls, with its heartbeat inside
    w.{epoch}.{version}.{root}.tmp  what it writes, then renames
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from streamrl.errors import RunLockedError, WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, VersionRef
from streamrl.weights.adapter import BASE_REF
from streamrl.weights.document import HEADER_BYTES, Document, NotAvailable, Superseded
from streamrl.weights.manifest import document_nbytes
from streamrl.weights.shm.directory import SHM_ROOT, check_run_id, lock_file, make_private
from streamrl.weights.shm.writer import DocumentWriter, SpareFile
from streamrl.weights.transport import Brought, Receiver

log = logging.getLogger(__name__)

MEMBERS = "members.lock"
KEEP = 2
"""Versions that stay: the newest, and the one before it, which another process may be mapping."""
HEARTBEAT_S = 0.5
# Ten heartbeats: a loaded machine delays a few of them without anything being wrong.
STOPPED_S = 5.0
"""A puller without a heartbeat for so long is stopped or hung: processes that wait for it pull for themselves."""
_POLL_S = 0.02
_NAME = re.compile(r"w\.(\d+)\.(\d+)\.[0-9a-f]{16}")


class HostShare:
    """This process's membership in the cache of a run; the first version that is pulled makes the directory.

    Args:
        root: shared memory; another directory in tests.
    Attributes:
        full: shared memory had no room for a document, so this process waits for no other and writes nothing.
    Raises:
        WeightsError: the run id cannot name a directory.
    """

    def __init__(self, run_id: str, root: Path = SHM_ROOT) -> None:
        check_run_id(run_id)
        self._root = root
        self.path = root / f"streamrl.share.{os.getuid()}.{run_id}"
        self._membership: int | None = None
        self._lock = threading.Lock()
        # Set by a failed attempt to join, which is not repeated for each version, and by `close`.
        self._broken = False
        self.full = False

    def no_room(self, why: object) -> None:
        """Remember it, and log it once: every document of a run is as large as the last one."""
        if not self.full:
            self.full = True
            log.warning("no room in %s to share a version, so this process pulls for itself from now on: %s",
                        self.path, why)

    def join(self) -> bool:
        """Become a member; False if this host has no shared memory to share."""
        with self._lock:
            if self._membership is None and not self._broken:
                try:
                    # Here, because no process of a killed run is left to do it.
                    remove_dead(self._root)
                    self._membership = join(self.path)
                except (OSError, RunLockedError) as error:
                    self._broken = True
                    log.info("weights are not shared on this host: %s", error)
            return self._membership is not None

    def close(self) -> None:
        """Leave; the last member removes the directory. May be called twice."""
        with self._lock:
            fd, self._membership, self._broken = self._membership, None, True
        if fd is not None:
            leave(self.path, fd)

    def document_path(self, manifest: Manifest) -> Path:
        """The path of this version of this run once a member has it."""
        ref = manifest.ref
        # The root is part of the name: equal numbers of two runs or learners never share a file.
        return self.path / f"w.{ref.learner_epoch}.{ref.version}.{manifest.root[:8].hex()}"


class SharedReceiver:
    """A puller that looks at the host's cache first (`source` is SHM then), and leaves there what it had to pull."""

    def __init__(self, share: HostShare, puller: Receiver) -> None:
        self._share, self._puller = share, puller
        self.source = puller.source

    def receive(self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float) -> Brought:
        """Receive as every receiver does; wait while another process of this host pulls the same version."""
        pull = partial(self._pull, manifest, layout, cancelled=cancelled, deadline=deadline)
        if not self._share.join():
            return pull()
        path, began = self._share.document_path(manifest), time.monotonic()
        watch = Watch(path)
        while True:
            if (found := _map(path, manifest, layout, began)) is not None:
                self.source = InstallSource.SHM
                return found
            if self._share.full:
                return pull()
            # The lock decides who pulls; no process waits inside the call, so that cancellation is noticed.
            with turn(path) as mine:
                if mine is not None:
                    if path.exists():
                        continue  # written between the look and the lock
                    # Looked at before the pull: a document that fits nowhere should not make the others wait for it.
                    if has_room(path.parent, HEADER_BYTES + document_nbytes(layout)):
                        with heartbeat(mine):
                            return self._leave(path, pull())
                    self._share.no_room(f"{document_nbytes(layout) >> 20} MiB are too much")
                    continue  # with no other process waiting for us
            if watch.stopped():
                log.warning("the process of this host that pulls version %s hangs: pulling it here, too", manifest.ref)
                return pull()
            if cancelled.wait(_POLL_S):
                raise Superseded(f"version {manifest.ref}: abandoned for a newer version")
            if time.monotonic() >= deadline:
                raise NotAvailable(f"version {manifest.ref}: another process of this host did not bring it in time")

    def _pull(self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float) -> Brought:
        pulled = self._puller.receive(manifest, layout, cancelled=cancelled, deadline=deadline)
        self.source = self._puller.source
        return pulled

    def _leave(self, path: Path, pulled: Brought) -> Brought:
        """Write what was pulled; from then on the shared pages are used, and the private copy is given back."""
        document, *seconds = pulled
        try:
            _write(document, path)
        except OSError as error:
            self._share.no_room(error)
            return pulled
        # After the write, so that an older version stays until a newer one is complete.
        retire(path.parent)
        # The written file is verified again, so that what this process uses is what the others will map.
        shared = _map(path, document.manifest, document.layout, time.monotonic())
        return pulled if shared is None else (shared[0], *seconds)


def _write(document: Document, path: Path) -> None:
    file = SpareFile(path.with_name(f"{path.name}.tmp"), document.nbytes)
    writer = DocumentWriter(file, path, document.manifest.ref, document.layout, lambda done: done.drop())
    try:
        writer.append(document.view(0, document.nbytes))
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _map(path: Path, manifest: Manifest, layout: Layout, began: float) -> Brought | None:
    """The verified document in this file, or None; a file with wrong bytes is removed."""
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


# --- the folder: membership, the right to write a version, and cleanup ---------------------------------------------


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
    """Remove all but the newest versions, never the base of adapters; mappings survive it."""
    found: dict[VersionRef, list[Path]] = {}
    for entry in path.iterdir():
        if (match := _NAME.match(entry.name)) is not None:
            found.setdefault(VersionRef(int(match[1]), int(match[2])), []).append(entry)
    found.pop(BASE_REF, None)
    for ref in sorted(found)[:-KEEP]:
        for entry in found[ref]:
            entry.unlink(missing_ok=True)
