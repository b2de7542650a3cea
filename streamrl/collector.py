"""Python's collector of cyclic garbage looks again and again at all that lives; this keeps out of it what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Around what makes many objects that stay, such as imports: no collection inside, and none looks at them later.

    Garbage that exists at the end is kept too.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
