"""Waiting for threads and processes, and limits of this process."""

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def until(condition: Callable[[], object]) -> None:
    """Look again and again; the test's own time limit ends it."""
    while not condition():
        threading.Event().wait(0.01)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
