"""Exclude long-lived objects (libraries, models) from cyclic garbage collection, which would scan them repeatedly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable collection inside and freeze what exists at the end, for imports and other long-lived allocations.

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
