"""Weights on one host: a document file in shared memory that readers map.

The publisher writes `w.{epoch}.{version}.tmp` and renames it to `w.{epoch}.{version}`: the rename is the commit, and no
byte changes after it. Old versions are unlinked; a reader that mapped one keeps it, because mappings survive unlinking.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Manifest, Offer, VersionRef
from streamrl.weights.document import (
    HEADER_BYTES,
    PROBE_BYTES,
    Document,
    NotAvailable,
    Superseded,
    pack_header,
    unpack_header,
)
from streamrl.weights.manifest import check_layout, document_nbytes
from streamrl.weights.rundir import RunDirectory

log = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 10  # digested, then written while it is still in the cache


class ShmPublisher:
    """Owns the directory of a run's documents; lives in the learner's rank 0.

    Args:
        directory: usually `document_directory(run_id, run_folder)`; claimed here, removed by `close`.
        run_id: a directory of another run is refused.
        keep_versions: complete documents that stay; older ones are unlinked at each commit.
        fallback: a directory on disk, used (loudly) for a document that shared memory has no room for.
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
        self._fallback_path = None if fallback is None else Path(fallback)
        self._directory = RunDirectory(directory, run_id)
        self._fallback: RunDirectory | None = None
        self._kept: list[Path] = []
        self._closed = False

    @property
    def directory(self) -> Path:
        return self._directory.path

    def begin(self, ref: VersionRef, layout: Layout) -> DocumentWriter:
        """Start the document of `ref`; nobody sees it before `DocumentWriter.commit`.

        Raises:
            WeightsError: closed, the version exists, or there is no room here nor in the fallback.
        """
        if self._closed:
            raise WeightsError(f"the publisher of {self.directory} is closed")
        try:
            return DocumentWriter(self._directory.path, ref, layout, self._committed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = error
        if self._fallback_path is None:
            raise WeightsError(f"no room for version {ref} ({document_nbytes(layout)} bytes): {reason}") from reason
        log.warning(
            "%s has no room for version %s (%d MiB): %s. It goes to %s, which is slower; enlarge shared memory or "
            "lower keep_versions", self.directory, ref, document_nbytes(layout) >> 20, reason, self._fallback_path,
        )
        if self._fallback is None:
            self._fallback = RunDirectory(self._fallback_path, self._run_id)
        try:
            return DocumentWriter(self._fallback.path, ref, layout, self._committed)
        except OSError as error:
            raise WeightsError(f"no room for version {ref} in {self._fallback.path} either: {error}") from error

    def _committed(self, path: Path) -> None:
        self._kept.append(path)
        while len(self._kept) > self._keep_versions:
            self._kept.pop(0).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlink every document and the directory; may be called twice."""
        self._closed = True
        self._directory.release()
        if self._fallback is not None:
            self._fallback.release()

    def __enter__(self) -> ShmPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class DocumentWriter:
    """One document being written, in layout order, digested on the way.

    Raises:
        OSError: ENOSPC, before any byte is written: the room is reserved at the start.
    """

    def __init__(
        self, directory: Path, ref: VersionRef, layout: Layout, committed: Callable[[Path], None] = lambda path: None
    ) -> None:
        check_layout(layout)
        self._path = directory / f"w.{ref.learner_epoch}.{ref.version}"
        self._tmp = self._path.with_name(self._path.name + ".tmp")
        if self._path.exists():
            raise WeightsError(f"version {ref} is published already: a document is never rewritten")
        self._ref = ref
        self._bucket_bytes = layout.bucket_bytes
        self._nbytes = document_nbytes(layout)
        self._committed = committed
        self._digests: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._bucket_left = self._bucket_bytes[0]
        self._written = 0
        self._fd = os.open(self._tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._reserve()
            os.write(self._fd, pack_header(os.urandom(PROBE_BYTES), ref, self._nbytes))
        except BaseException:
            self.abort()
            raise

    def _reserve(self) -> None:
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + self._nbytes)
        except OSError as error:
            # A file system that cannot reserve says so; a full one must be heard now, not in the middle of a gather.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """The document's next bytes; any length."""
        view = memoryview(data).cast("B")
        if (total := self._written + len(view)) > self._nbytes:
            raise WeightsError(f"version {self._ref}: {total} bytes were written, the layout holds {self._nbytes}")
        while len(view):
            piece = view[: min(len(view), self._bucket_left, _PIECE_BYTES)]
            self._hasher.update(piece)
            _write_all(self._fd, piece)
            self._written += len(piece)
            self._bucket_left -= len(piece)
            if self._bucket_left == 0:
                self._next_bucket()
            view = view[len(piece) :]

    def _next_bucket(self) -> None:
        self._digests.append(self._hasher.digest())
        self._hasher.reset()
        if len(self._digests) < len(self._bucket_bytes):
            self._bucket_left = self._bucket_bytes[len(self._digests)]

    def digests(self) -> list[bytes]:
        """One digest a bucket, of the complete document."""
        if self._written != self._nbytes:
            raise WeightsError(
                f"version {self._ref} has {self._written} of {self._nbytes} bytes: it cannot be published unfinished"
            )
        return self._digests

    def commit(self) -> Path:
        """Make the finished document visible under its final name; old versions retire now."""
        self.digests()
        os.close(self._fd)
        self._fd = -1
        os.rename(self._tmp, self._path)
        self._committed(self._path)
        return self._path

    def abort(self) -> None:
        """Forget the document; no effect after `commit`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._tmp.unlink(missing_ok=True)


def _write_all(fd: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(fd, piece) :]


def shm_offer(path: str | Path) -> Offer:
    """The offer of a published document, for an ANNOUNCE or a WELCOME."""
    with open(path, "rb") as file:
        probe, _, nbytes = unpack_header(file.read(HEADER_BYTES))
    return Offer("shm", str(path), nbytes, probe)


class ShmReceiver:
    """Opens what an offer names, if this process sees the same file."""

    source = InstallSource.SHM

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def receive(
        self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
    ) -> tuple[Document, float, float]:
        """(verified document, transfer_s, verify_s); the mapping is held from before the check until the last tensor.

        Nothing here waits for anybody, so `cancelled` and `deadline` are only looked at before the check.

        Raises:
            NotAvailable: no such file here, or another of that name (a container, another host, a retired version).
            WeightsError: the right file with the wrong bytes; names the bucket.
        """
        started = time.monotonic()
        try:
            with open(self._offer.name, "rb", opener=_open_plain) as file:
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
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
