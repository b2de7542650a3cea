"""Weights on one host: a document file in shared memory that readers map.

The publisher fills a spare file, `w.{epoch}.{version}.tmp`, and renames it to `w.{epoch}.{version}`: the rename is the
commit, and no byte changes after it. Old versions are unlinked; a reader that mapped one keeps it, because mappings
survive unlinking. After each commit a thread leaves the machine to the readers for a moment, then unlinks retired
versions and makes the next spare file, so shared memory holds `keep_versions` documents and one spare.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType

import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, Offer, VersionRef
from streamrl.weights.document import (
    HEADER_BYTES,
    PIECE_BYTES,
    PROBE_BYTES,
    Document,
    NotAvailable,
    pack_header,
    unpack_header,
)
from streamrl.weights.manifest import check_layout, document_nbytes
from streamrl.weights.shm.directory import SPARE_NAME, RunDirectory
from streamrl.weights.transport import Transport

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


# --- writing one document --------------------------------------------------------------------------------------------

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_POPULATE_BYTES = 1 << 20


class SpareFile:
    """The file of a document that does not exist yet: room is reserved, pages are mapped.

    Making one costs more than filling it, so the publisher makes the next one while the learner trains.

    Raises:
        OSError: ENOSPC or EFBIG when the room is not there; nothing is left behind.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _reserve(fd, HEADER_BYTES + nbytes)
            self.mapping = mmap.mmap(fd, HEADER_BYTES + nbytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            # The mapping keeps the file; the descriptor is not needed any more.
            os.close(fd)

    def populate(self) -> None:
        """Allocate every page now, in small steps that let other threads run."""
        try:
            for start in range(0, len(self.mapping), _POPULATE_BYTES):
                self.mapping.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, len(self.mapping) - start))
                # Releases the interpreter lock: training goes on meanwhile.
                time.sleep(0)
        except OSError:
            pass  # an older kernel allocates pages when they are written

    def drop(self) -> None:
        """Unmap the file once its last view is gone."""
        # A placeholder in its place: a mapping with exported views cannot be closed, only dropped.
        self.mapping = mmap.mmap(-1, 1)

    def move(self, path: Path) -> None:
        os.rename(self.path, path)
        self.path = path


def _reserve(fd: int, nbytes: int) -> None:
    """Allocate real room, or raise ENOSPC: writing to a mapping without room would kill the process."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        # Systems (macOS) and file systems without fallocate: writing zeros reserves the room as well, only slower.
        zeros = bytes(_POPULATE_BYTES)
        for start in range(0, nbytes, len(zeros)):
            os.pwrite(fd, zeros[: min(len(zeros), nbytes - start)], start)


class DocumentWriter:
    """One document being written in layout order, and digested while its bytes are still in the cache.

    Args:
        file: of exactly the document's size; renamed to `path` by `commit`.
        committed: called after the rename with the file, to be dropped: unmapping takes a while.
    """

    def __init__(
        self, file: SpareFile, path: Path, ref: VersionRef, layout: Layout, committed: Callable[[SpareFile], None]
    ) -> None:
        check_layout(layout)
        assert file.nbytes == document_nbytes(layout), (file.nbytes, document_nbytes(layout))
        self._file: SpareFile | None = file
        self._path, self._ref, self._committed = path, ref, committed
        self._bucket_bytes = layout.bucket_bytes
        self._nbytes = file.nbytes
        self._body = memoryview(file.mapping)[HEADER_BYTES:]
        self._digests: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._bucket_left = self._bucket_bytes[0]
        self._written = 0
        file.mapping[:HEADER_BYTES] = pack_header(os.urandom(PROBE_BYTES), ref, self._nbytes)

    def room(self, nbytes: int) -> memoryview:
        """The document's next bytes, to be filled in place; then call `filled(nbytes)`."""
        if (total := self._written + nbytes) > self._nbytes:
            raise WeightsError(f"version {self._ref}: {total} bytes were written, the layout holds {self._nbytes}")
        return self._body[self._written : total]

    def filled(self, nbytes: int) -> None:
        """Digest the bytes that were put into `room`."""
        while nbytes:
            step = min(nbytes, self._bucket_left)
            self._hasher.update(self._body[self._written : self._written + step])
            self._written += step
            self._bucket_left -= step
            nbytes -= step
            if self._bucket_left == 0:
                self._next_bucket()

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """The document's next bytes, copied; any length."""
        view = memoryview(data).cast("B")
        # In pieces, so that the digest reads what the copy has just brought into the cache.
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self.room(len(piece))[:] = piece
            self.filled(len(piece))

    @property
    def where(self) -> tuple[Path, bytes]:
        """The file now, and the random bytes that it begins with: for other processes that write parts of it."""
        assert self._file is not None, f"version {self._ref} was committed or aborted before"
        return self._file.path, bytes(self._file.mapping[:PROBE_BYTES])

    def was_written(self, digests: list[bytes]) -> None:
        """Other processes have written the whole body; these are the digests of its buckets."""
        # The digests were computed from the file after the writes of all ranks, so they cover every byte.
        self._digests, self._written = digests, self._nbytes

    def _next_bucket(self) -> None:
        self._digests.append(self._hasher.digest())
        self._hasher.reset()
        if len(self._digests) < len(self._bucket_bytes):
            self._bucket_left = self._bucket_bytes[len(self._digests)]

    def digests(self) -> list[bytes]:
        """One digest per bucket, of the complete document."""
        if self._written != self._nbytes:
            raise WeightsError(
                f"version {self._ref} has {self._written} of {self._nbytes} bytes: it cannot be published unfinished"
            )
        return self._digests

    def commit(self) -> Path:
        """Make the finished document visible under its final name; it never changes again."""
        # Raises for an unfinished document before the rename, which is the commit.
        self.digests()
        assert self._file is not None, f"version {self._ref} was committed or aborted before"
        file = self._file
        file.move(self._path)
        self._forget()
        self._committed(file)
        return self._path

    def abort(self) -> None:
        """Discard the document; no effect after `commit`."""
        if self._file is not None:
            self._file.path.unlink(missing_ok=True)
            self._forget()

    def _forget(self) -> None:
        self._file = None
        self._body = memoryview(b"")


# --- the transport ----------------------------------------------------------------------------------------------------


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

    def receive(self, manifest: Manifest, layout: Layout) -> Generator[int, None, Document]:
        """Map the document, which is verified where it lies: nothing is copied.

        Raises:
            NotAvailable: no such file here, or another of that name (a container, another host, a retired version).
            WeightsError: the right file with the wrong size.
        """
        try:
            with open(self._offer.name, "rb", opener=open_plain) as file:
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
        yield 0  # mapping populates pages, which takes a while
        return document


def open_plain(path: str, flags: int) -> int:
    """Open a file that another process named; for `open`."""
    # The path comes from a peer: no link is followed, and O_NONBLOCK keeps a FIFO from blocking the open.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


SHM = Transport(offer=lambda published: shm_offer(published.path), receiver=lambda offer, actor: ShmReceiver(offer))
