"""Writing one document: bytes go into a mapped spare file, whose name is changed once all of them are there."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from streamrl.errors import WeightsError
from streamrl.messages import Layout, VersionRef
from streamrl.weights.document import HEADER_BYTES, PROBE_BYTES, digest_all, pack_header
from streamrl.weights.manifest import bucket_ranges, document_nbytes

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
                # Releases the interpreter lock: this runs beside training.
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
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        # File systems without fallocate: writing zeros reserves the room as well, only slower.
        zeros = bytes(_POPULATE_BYTES)
        for start in range(0, nbytes, len(zeros)):
            os.pwrite(fd, zeros[: min(len(zeros), nbytes - start)], start)


class DocumentWriter:
    """One document being written in layout order.

    Args:
        file: of exactly the document's size; renamed to `path` by `commit`.
        committed: called after the rename with the file, to be dropped: unmapping takes a while.
    """

    def __init__(
        self, file: SpareFile, path: Path, ref: VersionRef, layout: Layout, committed: Callable[[SpareFile], None]
    ) -> None:
        assert file.nbytes == document_nbytes(layout), (file.nbytes, document_nbytes(layout))
        self._file: SpareFile | None = file
        self._path, self._ref, self._layout, self._committed = path, ref, layout, committed
        self._nbytes = file.nbytes
        self._body = memoryview(file.mapping)[HEADER_BYTES:]
        self._digests: list[bytes] | None = None
        self._written = 0
        file.mapping[:HEADER_BYTES] = pack_header(os.urandom(PROBE_BYTES), ref, self._nbytes)

    def room(self, nbytes: int) -> memoryview:
        """The document's next bytes, to be filled by the caller."""
        if (total := self._written + nbytes) > self._nbytes:
            raise WeightsError(f"version {self._ref}: {total} bytes were written, the layout holds {self._nbytes}")
        start, self._written = self._written, total
        return self._body[start:total]

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """The document's next bytes, copied; any length."""
        view = memoryview(data).cast("B")
        self.room(len(view))[:] = view

    @property
    def where(self) -> tuple[Path, bytes]:
        """The file now, and the random bytes that it begins with: for other processes that write parts of it."""
        assert self._file is not None, f"version {self._ref} was committed or aborted before"
        return self._file.path, bytes(self._file.mapping[:PROBE_BYTES])

    def was_written(self, digests: list[bytes]) -> None:
        """Other processes have written the whole body; these are the digests of its buckets."""
        # The digests were computed from the file after the writes of all ranks, so they cover every byte.
        self._digests, self._written = digests, self._nbytes

    def digests(self) -> list[bytes]:
        """One digest per bucket, of the complete document."""
        self._require_complete()
        if self._digests is None:
            self._digests = digest_all([self._body[start:end] for start, end in bucket_ranges(self._layout)])
        return self._digests

    def commit(self) -> Path:
        """Make the finished document visible under its final name; it never changes again."""
        # Raises for an unfinished document before the rename, which is the commit.
        self._require_complete()
        assert self._file is not None, f"version {self._ref} was committed or aborted before"
        file = self._file
        file.move(self._path)
        self._forget()
        self._committed(file)
        return self._path

    def _require_complete(self) -> None:
        if self._written != self._nbytes:
            raise WeightsError(
                f"version {self._ref} has {self._written} of {self._nbytes} bytes: it cannot be published unfinished"
            )

    def abort(self) -> None:
        """Discard the document; no effect after `commit`."""
        if self._file is not None:
            self._file.path.unlink(missing_ok=True)
            self._forget()

    def _forget(self) -> None:
        self._file = None
        self._body = memoryview(b"")
