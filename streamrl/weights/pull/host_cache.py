"""Actors of one host fetch a version once: the first one pulls it and leaves it in shared memory, the others map it.

There is no coordinator. A version is a file, `w.{epoch}.{version}.{root}`, that appears complete by a rename and never
changes. A `flock`, which the kernel drops when its holder dies, decides which process writes it, so another one takes
over at once. A process that maps the file digests every bucket, as with any other transport.

    members.lock                    held shared by every living member; held exclusively to remove the directory
    w.{epoch}.{version}.{root}.lock held by the member that pulls, with its heartbeat inside
    w.{epoch}.{version}.{root}.tmp  what it writes, then renames
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from pathlib import Path

from streamrl.errors import RunLockedError, WeightsError
from streamrl.messages import InstallSource, Layout, Manifest
from streamrl.weights.document import HEADER_BYTES, Document, NotAvailable, Superseded
from streamrl.weights.manifest import document_nbytes
from streamrl.weights.pull.cache_folder import Watch, has_room, heartbeat, join, leave, remove_dead, retire, turn
from streamrl.weights.shm.directory import SHM_ROOT
from streamrl.weights.shm.writer import DocumentWriter, SpareFile
from streamrl.weights.transport import Receiver

log = logging.getLogger(__name__)

_POLL_S = 0.02
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Pulled = tuple[Document, float, float]


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
        if not _RUN_ID.fullmatch(run_id):
            raise WeightsError(f"run_id {run_id!r} cannot name a directory: use up to 64 of A-Z a-z 0-9 . _ -")
        self._root = root
        self.path = root / f"streamrl.share.{os.getuid()}.{run_id}"
        self._membership: int | None = None
        self._lock = threading.Lock()
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
        """Where this version of this run lies once a member has it."""
        ref = manifest.ref
        return self.path / f"w.{ref.learner_epoch}.{ref.version}.{manifest.root[:8].hex()}"


class SharedReceiver:
    """A puller that looks at the host's cache first, and leaves there what it had to pull.

    Attributes:
        source: SHM if another process had pulled it, else the puller's own.
    """

    def __init__(self, share: HostShare, puller: Receiver) -> None:
        self._share, self._puller = share, puller
        self.source = puller.source

    def receive(
        self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
    ) -> Pulled:
        """As every receiver; waits while another process of this host pulls the same version."""
        if not self._share.join():
            return self._pull(manifest, layout, cancelled, deadline)
        path, began = self._share.document_path(manifest), time.monotonic()
        watch = Watch(path)
        while True:
            if (found := _map(path, manifest, layout, began)) is not None:
                self.source = InstallSource.SHM
                return found
            if self._share.full:
                return self._pull(manifest, layout, cancelled, deadline)
            with turn(path) as mine:
                if mine is not None:
                    if path.exists():
                        continue  # written between the look and the lock
                    if has_room(path.parent, HEADER_BYTES + document_nbytes(layout)):
                        return self._pull_and_leave(mine, path, manifest, layout, cancelled, deadline)
                    self._share.no_room(f"{document_nbytes(layout) >> 20} MiB are too much")
                    continue  # with no other process waiting for us
            if watch.stopped():
                log.warning("the process of this host that pulls version %s hangs: pulling it here, too", manifest.ref)
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
        with heartbeat(lock):
            document, transfer_s, verify_s = self._pull(manifest, layout, cancelled, deadline)
            try:
                _write(document, path)
            except OSError as error:
                self._share.no_room(error)
                return document, transfer_s, verify_s
            retire(path.parent)
            # From here on the shared pages are used, and the private copy is given back.
            shared = _map(path, manifest, layout, time.monotonic())
        return (shared[0] if shared is not None else document), transfer_s, verify_s


def _write(document: Document, path: Path) -> None:
    file = SpareFile(path.with_name(f"{path.name}.tmp"), document.nbytes)
    writer = DocumentWriter(file, path, document.manifest.ref, document.layout, lambda done: done.drop())
    try:
        writer.append(document.view(0, document.nbytes))
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _map(path: Path, manifest: Manifest, layout: Layout, began: float) -> Pulled | None:
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
