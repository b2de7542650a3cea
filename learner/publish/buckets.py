"""A whole document by several threads: each takes the next bucket, fills it and digests it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from streamrl.messages import Layout
from streamrl.weights.gpu.pinned import BUFFER_BYTES, Download
from streamrl.weights.manifest import bucket_ranges, document_nbytes, tensor_nbytes, tensor_offsets

MOST_THREADS = 4
"""More wait for memory, and a learner's host has other work."""
BYTES_A_THREAD = 31 << 20
"""A thread for less takes longer to start than it saves."""
_WIDEST = 8  # bytes of an element
_STEP_BYTES = 1 << 20
"""Copied, then digested while it is in the cache; threads that take smaller steps wait for the interpreter's lock."""
_SERIAL = 1 << 15
"""Numbers that torch casts in the calling thread; more wake a team, which a busy machine delays by seconds."""


def num_threads(nbytes: int, num_cores: int | None = None) -> int:
    """Threads that write a document of this size on this machine."""
    return max(1, min(MOST_THREADS, num_cores or os.cpu_count() or 1, nbytes // BYTES_A_THREAD))


class BucketWriter:
    """Fills documents of one layout from tensors that are all here.

    Args:
        dtypes: in the document, of each tensor of the layout.
        device: where the tensors are; each thread has pinned buffers and a stream of its own.
        threads: None chooses by size and machine.
    """

    def __init__(
        self, layout: Layout, dtypes: Sequence[torch.dtype], device: torch.device, *, threads: int | None = None
    ) -> None:
        self._ranges, self._dtypes, self._device = bucket_ranges(layout), dtypes, device
        self._ends = [offset + tensor_nbytes(spec) for spec, offset in tensor_offsets(layout)]
        count = threads or num_threads(document_nbytes(layout))
        self._downloads = [Download(device, nbytes=BUFFER_BYTES // count) for _ in range(count)]

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Return whether a bucket can be cut out of each: they lie here in one piece, no element in two buckets."""
        plain = all(isinstance(one, Tensor) and not hasattr(one, "full_tensor") for one in tensors)
        even = all(start % _WIDEST == 0 for start, _ in self._ranges)
        return even and plain and all(one.is_contiguous() for one in tensors)

    def write(self, tensors: Sequence[Tensor], body: memoryview) -> list[bytes]:
        """Fill the document; the digest of each bucket. A failure is raised when no thread writes any more."""
        flat, free = [one.detach().reshape(-1) for one in tensors], list(self._downloads)
        # The threads' own streams follow what this one was given until now.
        after = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

        def fill(span: tuple[int, int]) -> bytes:
            hasher, download = xxhash.xxh3_128(), free.pop()
            try:
                with download.stream(after):
                    for start, part, dtype in self._parts(flat, *span):
                        for piece in filled(body[start : span[1]], part, dtype, download):
                            hasher.update(piece)
            finally:
                free.append(download)
            return hasher.digest()

        if len(free) == 1:
            return list(map(fill, self._ranges))
        with ThreadPoolExecutor(len(free), thread_name_prefix="document") as threads:
            return list(threads.map(fill, self._ranges))

    def _parts(self, flat: Sequence[Tensor], start: int, end: int) -> Iterator[tuple[int, Tensor, torch.dtype]]:
        """(place, numbers, type in the document) of what lies between two bytes."""
        place = bisect_right(self._ends, start)
        while start < end:
            dtype, stop = self._dtypes[place], min(end, self._ends[place])
            first = flat[place].numel() - (self._ends[place] - start) // dtype.itemsize
            if stop > start:
                yield start, flat[place][first : first + (stop - start) // dtype.itemsize], dtype
            start, place = stop, place + 1


def filled(target: memoryview, flat: Tensor, dtype: torch.dtype, download: Download) -> Iterator[memoryview]:
    """Put numbers at the beginning of a place in the document; yields each piece while it is still in the cache."""
    if flat.dtype != dtype and flat.device.type == "cpu":  # cast on the way
        step = _STEP_BYTES // dtype.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            piece = target[start * dtype.itemsize : (start + part.numel()) * dtype.itemsize]
            there = torch.frombuffer(piece, dtype=dtype)
            torch._foreach_copy_(there.split(_SERIAL), part.split(_SERIAL))
            yield piece
        return
    there, whole = np.frombuffer(target, np.uint8), flat.to(dtype)
    here = [(0, whole.view(torch.uint8).numpy())] if whole.device.type == "cpu" else download.pieces([(0, whole)])
    for at, data in here:
        source = np.frombuffer(data, np.uint8)
        for start in range(0, len(source), _STEP_BYTES):
            piece = slice(at + start, at + min(start + _STEP_BYTES, len(source)))
            # numpy copies without the interpreter's lock, and on a CPU without threads that wait for each other.
            there[piece] = source[start : start + _STEP_BYTES]
            yield target[piece]
