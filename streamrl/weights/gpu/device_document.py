"""A version in the memory of a device: received bucket by bucket, verified there, read as tensors without a copy."""

from __future__ import annotations

import copy
import logging
import os
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest
from streamrl.weights.document import Document, check_digest
from streamrl.weights.manifest import (
    DIGEST_FOLD128,
    DTYPE_BYTES,
    bucket_ranges,
    check_manifest,
    document_nbytes,
    same_weights,
    tensor_nbytes,
    tensor_offsets,
)

log = logging.getLogger(__name__)


class DeviceDocument:
    """The counterpart of `streamrl.weights.document.Document` on any device: a uint8 tensor, all buckets checked.

    Args:
        body: uint8 [document bytes]; owned by the document and by every tensor it gave out.
        manifest: what was announced, under whatever digest kind: its name here.
        device_manifest: the same version in digest_kind 1, against which the bytes were checked in `verify_s` seconds.
    Raises:
        WeightsError: manifests, layout and body do not belong together.
    """

    def __init__(
        self, body: torch.Tensor, manifest: Manifest, device_manifest: Manifest, layout: Layout, *,
        verify_s: float = 0.0,
    ) -> None:
        check_manifest(device_manifest, layout, DIGEST_FOLD128)
        # Two manifests name one version by different digests; nothing else ties them together.
        if (manifest.ref, manifest.layout_digest) != (device_manifest.ref, device_manifest.layout_digest):
            raise WeightsError(f"version {manifest.ref} was offered with the digests of {device_manifest.ref}")
        if body.numel() != document_nbytes(layout):
            raise WeightsError(
                f"version {manifest.ref} has {body.numel()} bytes, its layout holds {document_nbytes(layout)}"
            )
        self.manifest, self.layout, self._buffer, self.verify_s = manifest, layout, body, verify_s

    def verify(self) -> DeviceDocument:
        """Return the document: every bucket was compared before it was made."""
        return self

    def renamed(self, manifest: Manifest) -> DeviceDocument:
        """The same bytes under another version. Raises WeightsError if they are not these bytes."""
        if not same_weights(self.manifest, manifest):
            raise WeightsError(f"version {manifest.ref} is not the verified document {self.manifest.ref}")
        renamed = copy.copy(self)
        renamed.manifest = manifest
        return renamed

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Checkpoint name to tensor, in wire dtype, as views of the document: read them, never write them."""
        found = {}
        for spec, offset in tensor_offsets(self.layout):
            raw = self._buffer[offset : offset + tensor_nbytes(spec)]
            if offset % DTYPE_BYTES[spec.dtype]:
                raw = raw.clone()  # a document of mixed dtypes may leave a tensor between two elements
            found[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
        return found


def empty_document(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the device. Raises torch.OutOfMemoryError, on the host too."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise torch.OutOfMemoryError(f"{device} has no memory for a document of {nbytes} bytes") from error


def check_device_bucket(index: int, data: torch.Tensor, manifest: Manifest) -> None:
    """Raise WeightsError unless this uint8 tensor is bucket `index` of the manifest; waits for the device."""
    check_digest(index, fold128(data), manifest)


class HostBuckets:
    """The buckets of a verified document on the host.

    Args:
        bounce: pinned host memory of at least a bucket, through which a GPU is reached at full speed; one user at a
            time. None for a device that is the host.
    """

    def __init__(self, document: Document, bounce: torch.Tensor | None = None) -> None:
        self.layout, self._document, self._bounce = document.layout, document, bounce
        self._ranges: Sequence[tuple[int, int]] = bucket_ranges(document.layout)

    def fill(self, index: int, out: torch.Tensor) -> None:
        """Copy bucket `index` into `out`, uint8 of at least its size; complete when this returns."""
        start, end = self._ranges[index]
        host = out[: end - start] if self._bounce is None else self._bounce[: end - start]
        host.numpy()[:] = np.frombuffer(self._document.view(start, end), dtype=np.uint8)
        if self._bounce is not None:
            # Waited for: the next call writes the same pinned buffer.
            out[: end - start].copy_(host, non_blocking=True)
            torch.cuda.current_stream(out.device).synchronize()


_MASK = (1 << 64) - 1
# A grid of rows: the index of a word splits into row and column, so no tensor of all indices is needed.
_ROW_WORDS = 1 << 12
_BLOCK_WORDS = _ROW_WORDS << 12
"""Words that are folded at once: 64 MiB, whose biased copy is the only temporary of that size."""


def pack(s1: int, s2: int) -> bytes:
    """The 16 bytes of a digest from its two sums, whatever their sign."""
    return struct.pack("<QQ", s1 & _MASK, s2 & _MASK)


def fold128(data: torch.Tensor) -> bytes:
    """16 bytes for a uint8 tensor [n] on any device; waits for the device."""
    return pack(*fold_sums(data).tolist())


def fold_sums(data: torch.Tensor, first_byte: int = 0, sums: torch.Tensor | None = None) -> torch.Tensor:
    """(s1, s2) of bytes that begin at `first_byte` of their bucket: int64 [2] on their device, not waited for.

    Args:
        data: uint8 [n], contiguous.
        sums: what they are added to, in place.
    """
    if sums is None:
        sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    lead = min(-first_byte % 4, data.numel())
    if lead:  # they end a word that other bytes began
        sums += _one_word(data[:lead], first_byte // 4 + 1, at=first_byte % 4)
    word = (first_byte + lead) // 4
    body = data[lead:]
    num_words = body.numel() // 4
    if num_words:
        aligned = body[: 4 * num_words]
        if aligned.data_ptr() % 4:
            # A view as int32 needs an address divisible by 4.
            aligned = aligned.clone()
        words, kernel = aligned.view(torch.int32), _kernel_on(data.device)
        if kernel is not None:
            kernel.add(words, word, sums)
        for start in range(0, num_words if kernel is None else 0, _BLOCK_WORDS):
            sums += _fold_words(words[start : start + _BLOCK_WORDS], word + start)
    if body.numel() > 4 * num_words:
        sums += _one_word(body[4 * num_words :], word + num_words + 1)
    return sums


@cache
def _kernel_on(device: torch.device) -> ModuleType | None:
    """The kernel, if it runs on this device: compiled for a GPU, on a CPU in the interpreter alone."""
    if (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1") or find_spec("triton") is None:
        return None
    words, found = torch.arange(-9, 5_000, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int64)
    try:
        from streamrl.weights.gpu import fold_kernel

        fold_kernel.add(words, 7, found := found.to(device))
        if not torch.equal(found, _fold_words(words, 7)):
            raise WeightsError(f"it gives {found.tolist()}")
    except Exception as error:  # of a compiler, a driver, a version of Triton: none is worth a run
        log.warning("digests are computed without their Triton kernel, which does not run here: %s", error)
        return None
    return fold_kernel


def _one_word(data: torch.Tensor, index: int, at: int = 0) -> torch.Tensor:
    """Both sums of up to four bytes of word `index`, from byte `at` of it on."""
    shifts = torch.arange(8 * at, 8 * (at + data.numel()), 8, device=data.device)
    word = (data.to(torch.int64) << shifts).sum()
    return torch.stack((word, word * index))


def _fold_words(words: torch.Tensor, before: int) -> torch.Tensor:
    """Both sums of int32 words that `before` words precede.

    A word with its highest bit flipped, read as signed, is the word minus 2^31. So the reductions read 32-bit numbers
    and accumulate in 64 bits, and the bias is added once; int64 arithmetic wraps, which is what modulo 2^64 asks for.
    """
    count = words.numel()
    rows, row = divmod(count, _ROW_WORDS)
    biased = words ^ (-(1 << 31))
    grid, rest = biased[: rows * _ROW_WORDS].view(rows, _ROW_WORDS), biased[rows * _ROW_WORDS :]
    device = words.device
    by_row = grid.sum(1, dtype=torch.int64)
    by_column = grid.sum(0, dtype=torch.int64)
    total = by_row.sum() + rest.sum(dtype=torch.int64)
    weighted = (by_row * (torch.arange(rows, device=device) * _ROW_WORDS)).sum()
    weighted += (by_column * torch.arange(1, _ROW_WORDS + 1, device=device)).sum()
    index = torch.arange(rows * _ROW_WORDS + 1, count + 1, device=device)
    weighted += (rest.to(torch.int64) * index).sum()
    s1 = total + _signed(count << 31)
    s2 = weighted + _signed((count * (count + 1) // 2) << 31) + s1 * before
    assert row == rest.numel()
    return torch.stack((s1, s2))


def _signed(number: int) -> int:
    """The same number modulo 2^64, as int64 holds it."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


class DocumentFold:
    """Digests of all buckets of a document whose bytes come piece by piece; waits for the device only at the end.

    Args:
        layout: its buckets are the units.
        device: where the bytes are.
    """

    def __init__(self, layout: Layout, device: Any) -> None:
        self._ends = list(accumulate(layout.bucket_bytes))
        self.sums = torch.zeros(len(layout.bucket_bytes), 2, dtype=torch.int64, device=device)
        """(s1, s2) of each bucket; sums of several folds of one document add up."""
        self._num_bytes = 0

    def append(self, data: torch.Tensor) -> None:
        """The document's next bytes, uint8 [n]."""
        self.add(data, self._num_bytes)

    def add(self, data: torch.Tensor, start: int) -> None:
        """The document's bytes from `start` on, uint8 [n]; each byte is given once."""
        if start + data.numel() > self._ends[-1]:
            raise WeightsError("more bytes were folded than the layout holds")
        self._num_bytes += data.numel()
        done, bucket = 0, bisect_right(self._ends, start)
        while done < data.numel():
            at = start + done
            step = min(data.numel() - done, self._ends[bucket] - at)
            first = at - (self._ends[bucket - 1] if bucket else 0)
            # Not waited for: a device folds while the next bytes arrive.
            fold_sums(data[done : done + step], first, self.sums[bucket])
            done, bucket = done + step, bucket + 1

    def digests(self, sums: torch.Tensor | None = None) -> list[bytes]:
        """One digest per bucket; waits for the device.

        Args:
            sums: of all folds of the document, where this one has seen but a part.
        Raises:
            WeightsError: the document is not complete.
        """
        if sums is None and self._num_bytes != self._ends[-1]:
            seen = bisect_right(self._ends, self._num_bytes)
            raise WeightsError(f"only {seen} of {len(self._ends)} buckets were folded")
        return [pack(s1, s2) for s1, s2 in (self.sums if sums is None else sums).tolist()]
