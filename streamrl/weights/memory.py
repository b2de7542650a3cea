"""Memory for documents that come over a network: private, in huge pages where they are to be had, and used again.

New pages cost more than the bytes that are copied into them. So the memory of a document is kept when the last tensor
of it is gone, for the next document of that size; never more than one.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import numpy as np


class DocumentMemory:
    """Gives out memory of one document at a time; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory may come back in the middle of `take`
        self._spare: mmap.mmap | None = None

    def take(self, nbytes: int) -> memoryview:
        """Writable memory with anything in it; it comes back by itself, once nothing refers to it any more."""
        with self._lock:
            spare, self._spare = self._spare, None
        pages = spare if spare is not None and len(spare) == nbytes else _new_pages(nbytes)
        # Views, arrays and tensors of the memory keep this array alive, and this array alone.
        array = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(array, self._give_back, pages).atexit = False
        return memoryview(array)

    def _give_back(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._spare = pages


def _new_pages(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
