"""Weights on one host: a document file in shared memory that readers map.

The publisher fills a spare file, `w.{epoch}.{version}.tmp`, and renames it to `w.{epoch}.{version}`: the rename is the
commit, and no byte changes after it. Old versions are unlinked; a reader that mapped one keeps it, because mappings
survive unlinking. After each commit a thread leaves the machine to the readers for a moment, then unlinks retired
versions and makes the next spare file, so shared memory holds `keep_versions` documents and one spare.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, Offer, VersionRef
from streamrl.weights.document import HEADER_BYTES, PROBE_BYTES, Document, NotAvailable, Superseded, unpack_header
from streamrl.weights.manifest import document_nbytes
from streamrl.weights.shm.directory import SPARE_NAME, RunDirectory
from streamrl.weights.shm.writer import DocumentWriter, SpareFile
from streamrl.weights.transport import Brought, Transport

log = logging.getLogger(__name__)

_READERS_BYTES_PER_S = 1e9
"""The cleanup after a commit waits as long as a reader at this rate takes: both need the same memory bandwidth."""
# No longer than this for a large document: the next publish needs the spare file.
_READERS_MAX_S = 1.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ShmPublisher:
    """The owner of a run's documents, in the learner's rank 0.

    Args:
        directory: usually `document_directory(run_id, run_folder)`; claimed here, removed by `close`.
        run_id: a directory of another run is refused.
        keep_versions: complete documents that stay; older ones are unlinked after each commit.
        fallback: a directory on disk, used with a warning for a document that shared memory has no room for.
    Raises:
        RunLockedError: another living publisher owns the directory.
    """

    def __init__(
        self, directory: str | Path, run_id: str, keep_versions: int = 2, *, fallback: str | Path | None = None
    ) -> None:
        if keep_versions < 1:
            raise WeightsError(f"keep_versions={keep_versions}: at least the newest version must stay")
        self._run_id = run_id
        self._keep_versions = keep_versions
        self._fallback_path = None if fallback is None or Path(fallback) == Path(directory) else Path(fallback)
        self._directory = RunDirectory(directory, run_id)
        self._fallback: RunDirectory | None = None
        self._kept: list[Path] = []
        self._spare: SpareFile | None = None
        self._cleanup_thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._closed = False

    @property
    def directory(self) -> Path:
        return self._directory.path

    def begin(
        self, ref: VersionRef, layout: Layout, *, wait_s: float | None = None, for_good: bool = False
    ) -> DocumentWriter:
        """Start the document of `ref`; no reader sees it before `DocumentWriter.commit`.

        Args:
            wait_s: longest wait for the cleanup after the last commit; None waits for its end.
            for_good: it stays until `close`, whatever is published later.
        Raises:
            WeightsError: closed, the version exists, the cleanup takes longer than `wait_s`, or there is no room.
        """
        if self._closed:
            raise WeightsError(f"the publisher of {self.directory} is closed")
        # The spare file is the cleanup's result, so the cleanup ends before a document begins.
        if not self.settle(wait_s):
            raise WeightsError(
                f"no spare file for version {ref} after {wait_s:g} s: unlinking old versions and making room for the "
                "next takes that long; look at the memory and the load of this machine"
            )
        nbytes = document_nbytes(layout)
        name = f"w.{ref.learner_epoch}.{ref.version}"
        if name in [path.name for path in self._kept]:
            raise WeightsError(f"version {ref} is published already: a document is never rewritten")
        try:
            file = self._spare_file(self.directory, name, nbytes)
        except OSError as error:
            # Only a lack of room is answered by another directory; other errors would occur there, too.
            if error.errno not in _NO_ROOM:
                raise
            file = self._fallback_file(ref, name, nbytes, error)
        # A document for good joins no list, so it is never retired, and makes no spare of its size.
        committed = SpareFile.drop if for_good else self._committed
        return DocumentWriter(file, file.path.with_name(name), ref, layout, committed)

    def _spare_file(self, directory: Path, name: str, nbytes: int) -> SpareFile:
        # Taken in any case: a spare of another size is removed before room is reserved for the right one.
        spare, self._spare = self._spare, None
        path = directory / f"{name}.tmp"
        if spare is not None and spare.nbytes == nbytes and spare.path.parent == directory:
            spare.move(path)
            return spare
        if spare is not None:
            spare.path.unlink(missing_ok=True)
        file = SpareFile(path, nbytes)
        file.populate()
        return file

    def _fallback_file(self, ref: VersionRef, name: str, nbytes: int, reason: OSError) -> SpareFile:
        if self._fallback_path is None:
            raise WeightsError(f"no room for version {ref} ({nbytes} bytes): {reason}") from reason
        log.warning(
            "%s has no room for version %s (%d MiB): %s. It goes to %s, which is slower; enlarge shared memory or "
            "lower keep_versions", self.directory, ref, nbytes >> 20, reason, self._fallback_path,
        )  # fmt: skip
        if self._fallback is None:
            self._fallback = RunDirectory(self._fallback_path, self._run_id)
        try:
            return self._spare_file(self._fallback.path, name, nbytes)
        except OSError as error:
            raise WeightsError(f"no room for version {ref} in {self._fallback.path} either: {error}") from error

    def _committed(self, file: SpareFile) -> None:
        self._kept.append(file.path)
        # Chosen here, unlinked by the thread: unmapping and unlinking large files takes milliseconds.
        retired = [self._kept.pop(0) for _ in range(len(self._kept) - self._keep_versions)]
        self._hurry.clear()
        thread = threading.Thread(target=self._cleanup, args=(retired, file), name="documents", daemon=True)
        self._cleanup_thread = thread
        thread.start()

    def _cleanup(self, retired: list[Path], file: SpareFile) -> None:
        directory, nbytes = file.path.parent, file.nbytes
        # `settle` sets the event: a learner that is ready to publish again does not sit out this wait.
        self._hurry.wait(min(nbytes / _READERS_BYTES_PER_S, _READERS_MAX_S))
        file.drop()
        for path in retired:
            path.unlink(missing_ok=True)
        if directory == self.directory:
            try:
                self._spare = SpareFile(directory / SPARE_NAME, nbytes)
                self._spare.populate()
            except OSError as error:
                log.debug("no spare file: %s", error)  # the next `begin` meets it, and warns

    def settle(self, wait_s: float | None = None) -> bool:
        """Finish the cleanup after the last commit, milliseconds of work; False if it takes over `wait_s` seconds."""
        self._hurry.set()
        if self._cleanup_thread is not None:
            self._cleanup_thread.join(wait_s)
            if self._cleanup_thread.is_alive():
                return False
            self._cleanup_thread = None
        return True

    def close(self) -> None:
        """Unlink every document and the directory; may be called twice."""
        self._closed = True
        self.settle()
        self._spare = None
        self._directory.release()
        if self._fallback is not None:
            self._fallback.release()

    def __enter__(self) -> ShmPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def shm_offer(path: str | Path) -> Offer:
    """The offer of a published document."""
    with open(path, "rb") as file:
        probe, _, nbytes = unpack_header(file.read(HEADER_BYTES))
    return Offer("shm", str(path), nbytes, probe)


class ShmReceiver:
    """Opens what an offer names, if this process sees the same file."""

    source = InstallSource.SHM

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def receive(self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float) -> Brought:
        """The verified document; `cancelled` and `deadline` are read once, before the check.

        Raises:
            NotAvailable: no such file here, or another of that name (a container, another host, a retired version).
            WeightsError: the right file with the wrong bytes; names the bucket.
        """
        started = time.monotonic()
        try:
            with open(self._offer.name, "rb", opener=_open_plain) as file:
                # The path alone proves nothing: another host or container may have a file of this name.
                probe = os.pread(file.fileno(), PROBE_BYTES, 0)
                if len(self._offer.probe) != PROBE_BYTES or probe != self._offer.probe:
                    raise NotAvailable(
                        f"{self._offer.name} starts with {probe.hex()[:8]}, the offer says "
                        f"{self._offer.probe.hex()[:8]}: not the hub's shared memory"
                    )
                document = Document.map_open_file(file.fileno(), manifest, layout)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte, or an empty file
            raise NotAvailable(f"{self._offer.name!r} cannot be opened here: {error}") from error
        mapped = time.monotonic()
        if cancelled.is_set():
            raise Superseded(f"version {manifest.ref}: abandoned for a newer version")
        if mapped >= deadline:
            raise NotAvailable(f"version {manifest.ref}: mapped {mapped - deadline:.1f} s after its deadline")
        document.verify()
        return document, mapped - started, time.monotonic() - mapped


def _open_plain(path: str, flags: int) -> int:
    # The path comes from a peer: no link is followed, and O_NONBLOCK keeps a FIFO from blocking the open.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


SHM = Transport(offer=lambda published: shm_offer(published.path), receiver=lambda offer, actor: ShmReceiver(offer))
