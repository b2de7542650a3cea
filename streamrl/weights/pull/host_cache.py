"""Actors of one host fetch a version once: the first one pulls it and leaves it in shared memory, the others map it.

There is no coordinator. A version is a file, `w.{epoch}.{version}.{root}`, that appears complete by a rename and never
changes. A `flock`, which the kernel drops when its holder dies, decides which process writes it, so another one takes
over at once. A process that maps the file digests every bucket, as with any other transport. The directory is held
shared by every living member (`shm.directory`), and the last one removes it.

    w.{epoch}.{version}.{root}.lock held by the member that pulls, which touches it while it makes progress
    w.{epoch}.{version}.{root}.tmp  what it writes, then renames
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from streamrl.errors import RunLockedError, WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, VersionRef
from streamrl.weights.adapter import BASE_REF
from streamrl.weights.document import HEADER_BYTES, Document
from streamrl.weights.manifest import bucket_ranges, document_nbytes
from streamrl.weights.shm.directory import PREFIX, SHM_ROOT, RunDirectory, check_run_id, lock_file, remove_dead
from streamrl.weights.shm.transport import DocumentWriter, SpareFile, open_plain
from streamrl.weights.transport import Receiver

log = logging.getLogger(__name__)

KEEP = 2
"""Versions that stay: the newest, and the one before it, which another process may be mapping."""
STOPPED_S = 10.0
"""A puller that made no progress for so long is stopped or hung: processes that wait for it pull for themselves. It
touches its lock many times a second, but taking room for a large document is one step of seconds."""
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
        self._root, self._name = root, f"share.{os.getuid()}.{run_id}"
        self.path = root / f"{PREFIX}{self._name}"
        self._directory: RunDirectory | None = None
        # Fetches of a version and of its base join from two threads.
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
            if self._directory is None and not self._broken:
                try:
                    # Here, because no process of a killed run is left to do it.
                    remove_dead(self._root)
                    self._directory = RunDirectory(self.path, self._name, shared=True)
                except (OSError, RunLockedError) as error:
                    self._broken = True
                    log.info("weights are not shared on this host: %s", error)
            return self._directory is not None

    def close(self) -> None:
        """Leave; the last member removes the directory. May be called twice."""
        with self._lock:
            directory, self._directory, self._broken = self._directory, None, True
        if directory is not None:
            directory.release()

    def around(self, puller: Receiver) -> SharedReceiver:
        """The receiver that pulls at most once on this host."""
        return SharedReceiver(self, puller)

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

    def receive(self, manifest: Manifest, layout: Layout) -> Generator[int, None, Document]:
        """Receive as every receiver does; wait while another process of this host pulls the same version."""
        if not self._share.join():
            return (yield from self._pull(manifest, layout))
        path, seen, changed_at = self._share.document_path(manifest), 0, time.monotonic()
        while True:
            if (found := _map(path, manifest, layout)) is not None:
                self.source = InstallSource.SHM
                return found
            if self._share.full:
                return (yield from self._pull(manifest, layout))
            # The lock decides who pulls; no process waits inside the call, so that cancellation is noticed.
            with turn(path) as mine:
                if mine is not None:
                    if path.exists():
                        continue  # written between the look and the lock
                    # Looked at before the pull: a document that fits nowhere should not make the others wait for it.
                    if has_room(path.parent, HEADER_BYTES + document_nbytes(layout)):
                        return self._leave(path, mine, (yield from self._pull(manifest, layout, mine)))
                    self._share.no_room(f"{document_nbytes(layout) >> 20} MiB are too much")
                    continue  # with no other process waiting for us
            if (touched := touched_at(path)) != seen:  # compared with itself alone: by our own clock it is how long ago
                seen, changed_at = touched, time.monotonic()
            elif time.monotonic() - changed_at > STOPPED_S:
                log.warning("the process of this host that pulls version %s hangs: pulling it here, too", manifest.ref)
                return (yield from self._pull(manifest, layout))
            yield 0
            time.sleep(_POLL_S)

    def _pull(self, manifest: Manifest, layout: Layout, lock: int | None = None) -> Generator[int, None, Document]:
        """Pull, and show progress on the lock that this process holds meanwhile."""
        steps = self._puller.receive(manifest, layout)
        with contextlib.closing(steps):
            while True:
                if lock is not None:
                    os.utime(lock)
                try:
                    yield next(steps)
                except StopIteration as end:
                    self.source = self._puller.source
                    return end.value

    def _leave(self, path: Path, lock: int, pulled: Document) -> Document:
        """Write what was pulled; from then on the shared pages are used, and the private copy is given back."""
        try:
            _write(pulled, path, lock)
        except FileNotFoundError:
            return pulled  # other members were two versions ahead, and retired the file while it was written
        except OSError as error:
            self._share.no_room(error)
            return pulled
        # After the write, so that an older version stays until a newer one is complete.
        retire(path.parent)
        # The written file is verified again, so that what this process uses is what the others will map.
        return _map(path, pulled.manifest, pulled.layout) or pulled


def _write(document: Document, path: Path, lock: int) -> None:
    file = SpareFile(path.with_name(f"{path.name}.tmp"), document.nbytes)
    writer = DocumentWriter(file, path, document.manifest.ref, document.layout, lambda done: done.drop())
    try:
        for start, end in bucket_ranges(document.layout):
            writer.append(document.view(start, end))
            os.utime(lock)
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _map(path: Path, manifest: Manifest, layout: Layout) -> Document | None:
    """The verified document in this file, or None; a file with wrong bytes is removed."""
    if not path.exists():
        return None
    try:
        with open(path, "rb", opener=open_plain) as file:
            return Document.map_open_file(file.fileno(), manifest, layout).verify()
    except FileNotFoundError:
        return None
    except (WeightsError, OSError, ValueError) as error:
        log.warning("%s is not version %s and is removed: %s", path, manifest.ref, error)
        path.unlink(missing_ok=True)
        return None


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


def touched_at(path: Path) -> int:
    """When the process that holds this document's lock last showed progress; 0 without a lock."""
    try:
        return path.with_name(f"{path.name}.lock").stat().st_mtime_ns
    except OSError:
        return 0


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
