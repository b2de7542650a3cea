"""Settings of a process's unused memory: the garbage collector and the C library's allocator."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of mallopt(3)


@contextmanager
def uncollected() -> Iterator[None]:
    """Exclude what is allocated inside (libraries, models) from cyclic garbage collection, which would scan it again
    and again: disable collection inside, and freeze what exists at the end.

    Garbage that exists at the end is kept too. The collector's previous state is restored.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def keep_freed_memory() -> bool:
    """Keep the memory of freed tensors in the process (models on a CPU): the next step reuses their pages.

    glibc returns large blocks to the system at once, and the next step has a page fault for each 4 KiB of them again:
    some 200,000 in a step of a model of 135 million parameters. In return the process keeps its peak.
    A MALLOC_ variable or GLIBC_TUNABLES of the user wins; other C libraries are left as they are.

    Returns:
        Whether the allocator was set.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if (libc := _glibc()) is None:
        return False
    # The arenas of other threads, such as an engine's, return memory to the system whatever the threshold.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))
    return all(libc.mallopt(name, value) for name, value in settings)


def return_freed_memory() -> None:
    """Return what was freed to the system, also after `keep_freed_memory`; no effect without glibc."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018 - other libraries of this name have no such settings
    except (OSError, AttributeError):
        return None
    return libc
