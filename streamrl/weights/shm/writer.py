"""Writing one document: bytes go into a mapped spare file and are digested while they are still in the cache."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import Layout, VersionRef
from streamrl.weights.document import HEADER_BYTES, PIECE_BYTES, PROBE_BYTES, pack_header
from streamrl.weights.manifest import check_layout, document_nbytes

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
    """One document being written in layout order, and digested as it is.

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
