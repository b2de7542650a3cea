"""One version's weights as bytes: mapped or received, verified, then read as tensors without a copy.

A document lies in a file behind a 64-byte header, or in plain memory. It is *unverified* until every bucket has
matched its digest; only a verified document gives tensors, so unchecked bytes can never be loaded.

    header  offset  size  field
            0       16    probe: random, different for every file; proves that two sides see the same one
            16      8     magic "SRLMDOC1"
            24      4     learner epoch, u32 little-endian
            28      4     zero
            32      8     version, u64
            40      8     bytes of the body, u64
            48      16    zero
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest, VersionRef
from streamrl.weights.manifest import (
    DTYPE_BYTES,
    bucket_digest,
    bucket_ranges,
    check_manifest,
    document_nbytes,
    same_weights,
    tensor_nbytes,
    tensor_offsets,
)

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 64
# First in the file: a reader on the same host knows from these bytes alone whether it sees the same document.
PROBE_BYTES = 16
MAGIC = b"SRLMDOC1"
PIECE_BYTES = 256 << 10
"""Copied, then digested while it is still in the cache, before the next piece is touched."""
NUM_THREADS = min(2, os.cpu_count() or 1)
# Below this a digest takes about a millisecond, and starting threads is not worth it.
_WORTH_A_THREAD = 8 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module has no name for it
_POPULATE_BYTES = 4 << 20
_HEADER = struct.Struct("<16s8sI4xQQ16x")
assert _HEADER.size == HEADER_BYTES


class NotAvailable(WeightsError):
    """This transport cannot bring the document here; another may."""


class VersionRetired(NotAvailable):
    """The version was retired while it was fetched; a newer manifest is on its way."""


class Superseded(WeightsError):
    """The fetch was abandoned because a newer version was announced."""


def pack_header(probe: bytes, ref: VersionRef, nbytes: int) -> bytes:
    """The 64 bytes before a document's body."""
    return _HEADER.pack(probe, MAGIC, ref.learner_epoch, ref.version, nbytes)


def unpack_header(raw: bytes) -> tuple[bytes, VersionRef, int]:
    """(probe, version, bytes of the body). Raises WeightsError if too short, or not a document."""
    if len(raw) < HEADER_BYTES:
        raise WeightsError(f"a document has a header of {HEADER_BYTES} bytes, this file has {len(raw)} bytes")
    probe, magic, epoch, version, nbytes = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise WeightsError(f"a document has magic {MAGIC!r} at byte 16, this file has {magic!r}")
    return probe, VersionRef(epoch, version), nbytes


class OpenFile:
    """A file that stays open, so that other processes of this user can map it, until nothing refers to it any more."""

    def __init__(self, fd: int) -> None:
        # A descriptor of its own: the caller closes the one that it opened.
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)

    @property
    def path(self) -> str:
        """Valid while this process lives and this object does, whatever becomes of the file's name."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"


class FileTensors(dict[str, "torch.Tensor"]):
    """Tensors by checkpoint name that are views of a file: `file`, None if they are not, and each one's first byte."""

    file: OpenFile | None = None
    offsets: Mapping[str, int]


class Document:
    """The bytes of one version, beside the manifest and layout that describe them.

    Args:
        body: the bytes in layout order, without a header; kept alive by the document and by every tensor it gave out.
        verified: the caller has digested every bucket as it arrived, in memory that only it can write.
        verify_s: seconds that this took.
        file: the file that `body` is a mapping of, behind the header.
    Raises:
        WeightsError: manifest and layout do not belong together.
    """

    def __init__(
        self, body: Any, manifest: Manifest, layout: Layout, *, verified: bool = False, verify_s: float = 0.0,
        file: OpenFile | None = None,
    ) -> None:
        check_manifest(manifest, layout)
        self._file = file
        self.manifest = manifest
        self.layout = layout
        # A numpy array pins its buffer, so a mapping cannot be unmapped under a live tensor.
        self._body = np.frombuffer(body, dtype=np.uint8)
        self._verified, self.verify_s = verified, verify_s

    @classmethod
    def map_file(cls, path: str | Path, manifest: Manifest, layout: Layout) -> Document:
        """The document in `path`, mapped privately: writes never reach it. Raises OSError or WeightsError."""
        with open(path, "rb") as file:
            return cls.map_open_file(file.fileno(), manifest, layout)

    @classmethod
    def map_open_file(cls, fd: int, manifest: Manifest, layout: Layout) -> Document:
        """Map a file that is open already, as `map_file` does."""
        _, ref, nbytes = unpack_header(os.pread(fd, HEADER_BYTES, 0))
        if ref != manifest.ref or nbytes != document_nbytes(layout):
            raise WeightsError(
                f"the file holds version {ref} of {nbytes} bytes, "
                f"wanted {manifest.ref} of {document_nbytes(layout)} bytes"
            )
        # Private and writable instead of read-only: torch warns about read-only memory, and a stray write then stays
        # in this process instead of ending it.
        mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        with contextlib.suppress(OSError):  # an older kernel: the pages come one by one
            for start in range(0, len(mapping), _POPULATE_BYTES):
                mapping.madvise(_MADV_POPULATE_READ, start, min(_POPULATE_BYTES, len(mapping) - start))
        return cls(memoryview(mapping)[HEADER_BYTES : HEADER_BYTES + nbytes], manifest, layout, file=OpenFile(fd))

    def verify(self) -> Document:
        """Digest every bucket; returns the document itself. Raises WeightsError naming the first wrong bucket."""
        if self._verified:
            return self
        started = time.perf_counter()
        view, ranges = memoryview(self._body), bucket_ranges(self.layout)
        for index, (_, end) in enumerate(ranges):
            if end > len(view):
                raise WeightsError(
                    f"bucket {index} of {len(ranges)} of version {self.manifest.ref} is cut: it ends at byte {end}, "
                    f"the document has {len(view)}"
                )
        # Cut documents were refused above by bucket; this finds bytes that no bucket covers.
        if len(view) != document_nbytes(self.layout):
            raise WeightsError(
                f"version {self.manifest.ref} has {len(view)} bytes, {len(ranges)} buckets of the layout hold "
                f"{document_nbytes(self.layout)}"
            )
        for index, digest in enumerate(digest_all([view[start:end] for start, end in ranges])):
            check_digest(index, digest, self.manifest)
        self._verified, self.verify_s = True, time.perf_counter() - started
        return self

    def renamed(self, manifest: Manifest) -> Document:
        """The same verified bytes under another version, of a restarted learner; WeightsError for other bytes."""
        if not self._verified or not same_weights(self.manifest, manifest):
            raise WeightsError(f"version {manifest.ref} is not the verified document {self.manifest.ref}")
        return Document(self._body, manifest, self.layout, verified=True, file=self._file)

    @property
    def nbytes(self) -> int:
        return len(self._body)

    def view(self, start: int, end: int) -> memoryview:
        """Bytes start..end, read-only; WeightsError if the document was not verified."""
        self._require_verified("view")
        return memoryview(self._body)[start:end].toreadonly()

    def tensors(self) -> FileTensors:
        """Checkpoint name to tensor in wire dtype, as views: never write them. WeightsError if not verified."""
        self._require_verified("tensors")
        places = tensor_offsets(self.layout)
        found = FileTensors((spec.name, _tensor(self._body, offset, spec)) for spec, offset in places)
        found.file, found.offsets = self._file, {spec.name: HEADER_BYTES + offset for spec, offset in places}
        return found

    def _require_verified(self, method: str) -> None:
        if not self._verified:
            raise WeightsError(f"version {self.manifest.ref} is not verified: call verify() before {method}()")


def check_digest(index: int, digest: bytes, manifest: Manifest) -> None:
    """Raise WeightsError unless this is the digest of bucket `index` of the manifest."""
    expected = manifest.digests[index]
    if digest != expected:
        raise WeightsError(
            f"bucket {index} of {len(manifest.digests)} of version {manifest.ref} has digest {digest.hex()[:8]}, "
            f"manifest says {expected.hex()[:8]}"
        )


def _tensor(body: np.ndarray, offset: int, spec: Any) -> torch.Tensor:
    import torch  # here, because the hub serves documents and must stay free of torch

    dtype = getattr(torch, spec.dtype)
    raw = body[offset : offset + tensor_nbytes(spec)]
    if not raw.size:
        return torch.empty(spec.shape, dtype=dtype)
    if raw.ctypes.data % DTYPE_BYTES[spec.dtype] or not raw.flags.writeable:
        raw = raw.copy()  # a document of mixed dtypes may leave a tensor between two elements
    return torch.from_numpy(raw).view(dtype).view(spec.shape)


def digest_all(buckets: Sequence[memoryview]) -> list[bytes]:
    """The digest of every bucket; large ones in two threads, because one core cannot saturate memory."""
    if NUM_THREADS == 1 or len(buckets) < 2 or sum(map(len, buckets)) < _WORTH_A_THREAD:
        return list(map(bucket_digest, buckets))
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="digest") as threads:
        return list(threads.map(bucket_digest, buckets))


class RunningDigest:
    """One bucket being filled in chunks: in order, memory is read once; out of order, a second time."""

    def __init__(self, bucket: memoryview) -> None:
        self._bucket = bucket
        self._restart()

    def _restart(self) -> None:
        self._hasher, self._upto = xxhash.xxh3_128(), 0

    def copy(self, offset: int, data: memoryview) -> float:
        """Put `data` at `offset`; seconds spent on digesting."""
        end, seconds = offset + len(data), 0.0
        if offset != self._upto:
            if offset < self._upto:
                self._restart()  # bytes that were digested already change
            self._bucket[offset:end] = data
            return seconds
        for start in range(offset, end, PIECE_BYTES):
            piece = self._bucket[start : min(start + PIECE_BYTES, end)]
            piece[:] = data[start - offset : start - offset + len(piece)]
            started = time.perf_counter()
            self._hasher.update(piece)
            seconds += time.perf_counter() - started
        self._upto = end
        return seconds

    def finish(self) -> tuple[bytes, float]:
        """(digest of the whole bucket, seconds spent on it); the next `copy` starts over."""
        started = time.perf_counter()
        digest = self._hasher.digest() if self._upto == len(self._bucket) else bucket_digest(self._bucket)
        self._restart()
        return digest, time.perf_counter() - started


class DocumentMemory:
    """Private memory for received documents, reused because new pages cost more than the bytes copied into them.

    The memory of one document is kept when its last tensor is gone, for the next document of that size. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory may come back in the middle of `take`
        self._spare: mmap.mmap | None = None

    def take(self, nbytes: int) -> memoryview:
        """Writable memory with arbitrary contents; it returns here once nothing refers to it any more."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and len(spare) == nbytes:
            pages = spare
        else:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        # Views, arrays and tensors of the memory keep this array alive, and this array alone.
        array = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(array, self._give_back, pages).atexit = False
        return memoryview(array)

    def _give_back(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._spare = pages
