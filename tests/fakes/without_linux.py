"""A fake system without what only Linux has; a copy of it named sitecustomize hides that in every Python process.

What is hidden: /proc and /dev/shm, seccomp and prctl, memfd, pidfd, O_DIRECT, fallocate, fdatasync, advice on pages,
affinity, glibc's allocator, and bubblewrap. psutil still reads /proc, and torch's build for Linux has its libc:
elsewhere they have other ways.
"""

import builtins
import ctypes
import functools
import io
import mmap
import os
import resource
import shutil
import sys
from collections.abc import Callable
from typing import Any

FOLDERS = ("/proc", "/dev/shm")
CALLS = ("posix_fallocate", "fdatasync", "memfd_create", "pidfd_open", "sched_getaffinity", "O_DIRECT", "posix_fadvise")
OF_LIBC = ("prctl", "mallopt", "unshare", "gnu_get_libc_version")


OURS = ("streamrl", "actors", "learner", "envs")


def _caller() -> str:
    """The module that called the function which asks."""
    return sys._getframe(2).f_globals.get("__name__", "")


def is_hidden(path: Any, caller: str) -> bool:
    if isinstance(path, int) or caller.startswith("psutil"):
        return False
    text = os.fsdecode(path)
    return any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS)


def hide_folders(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(path: Any = ".", *more: Any, **named: Any) -> Any:
        if is_hidden(path, _caller()):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return function(path, *more, **named)

    return call


class PlainMap(mmap.mmap):
    def madvise(self, *_: Any) -> None:
        raise OSError(22, "Invalid argument")


class PlainLibrary(ctypes.CDLL):
    def __init__(self, name: str | None, *more: Any, **named: Any) -> None:
        if name is not None and "libc.so" in str(name) and _caller().startswith(OURS):
            raise OSError(f"{name}: cannot open shared object file")
        super().__init__(name, *more, **named)

    def __getattr__(self, name: str) -> Any:
        if name in OF_LIBC:
            raise AttributeError(name)
        return super().__getattr__(name)


def hide() -> None:
    """Hide it all in this process."""
    for name in CALLS:
        if hasattr(os, name):
            delattr(os, name)
    for name in ("stat", "lstat", "open", "listdir", "scandir", "mkdir", "statvfs"):
        setattr(os, name, hide_folders(getattr(os, name)))
    builtins.open = io.open = hide_folders(io.open)  # type: ignore[assignment]
    mmap.mmap, ctypes.CDLL = PlainMap, PlainLibrary  # type: ignore[misc]
    del mmap.MADV_HUGEPAGE, resource.RUSAGE_THREAD
    which = shutil.which
    shutil.which = lambda name, *more, **named: None if name == "bwrap" else which(name, *more, **named)


if __name__ == "sitecustomize":
    hide()
