"""Digesting a lot of memory in little time: while it is copied and still in the cache, or in two threads at once."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from streamrl.weights.manifest import bucket_digest

PIECE_BYTES = 256 << 10
"""Copied, then digested, before the next piece is touched."""


NUM_THREADS = min(2, os.cpu_count() or 1)
_WORTH_A_THREAD = 8 << 20


def digest_all(buckets: Sequence[memoryview]) -> list[bytes]:
    """The digest of every bucket; large ones in two threads, because one core cannot read as fast as memory gives."""
    if NUM_THREADS == 1 or len(buckets) < 2 or sum(map(len, buckets)) < _WORTH_A_THREAD:
        return list(map(bucket_digest, buckets))
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="digest") as threads:
        return list(threads.map(bucket_digest, buckets))


class RunningDigest:
    """One bucket being filled in chunks. In order they cost one look at the memory; out of order, a second one."""

    def __init__(self, bucket: memoryview) -> None:
        self._bucket = bucket
        self._begin()

    def _begin(self) -> None:
        self._hasher, self._upto = xxhash.xxh3_128(), 0

    def copy(self, offset: int, data: memoryview) -> float:
        """Put `data` at `offset`; seconds spent on digesting."""
        end, seconds = offset + len(data), 0.0
        if offset != self._upto:
            if offset < self._upto:
                self._begin()  # something that was digested already changes
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
        """(the digest of the whole bucket as it is now, seconds spent here); the next `copy` begins anew."""
        started = time.perf_counter()
        digest = self._hasher.digest() if self._upto == len(self._bucket) else bucket_digest(self._bucket)
        self._begin()
        return digest, time.perf_counter() - started
