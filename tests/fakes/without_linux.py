"""A fake system without what only Linux has; a copy of it named sitecustomize hides that in every Python process.

psutil still reads /proc: elsewhere it has other ways.
"""

import builtins
import functools
import io
import mmap
import os
import resource
import shutil
import sys

CALLS = ("posix_fallocate", "fdatasync", "memfd_create", "pidfd_open", "sched_getaffinity", "O_DIRECT")


def hide_folders(function):
    @functools.wraps(function)
    def call(path=".", *more, **named):
        hidden = not isinstance(path, int) and f"{os.fsdecode(path)}/".startswith(("/proc/", "/dev/shm/"))
        if hidden and not sys._getframe(1).f_globals.get("__name__", "").startswith("psutil"):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return function(path, *more, **named)

    return call


class PlainMap(mmap.mmap):
    def madvise(self, *_):
        raise OSError(22, "Invalid argument")


if __name__ == "sitecustomize":
    for name in CALLS:
        delattr(os, name)
    for name in ("stat", "lstat", "open", "listdir", "scandir", "mkdir", "statvfs"):
        setattr(os, name, hide_folders(getattr(os, name)))
    builtins.open = io.open = hide_folders(io.open)
    mmap.mmap = PlainMap
    del mmap.MADV_HUGEPAGE, resource.RUSAGE_THREAD
    which = shutil.which
    shutil.which = lambda name, *more, **named: None if name == "bwrap" else which(name, *more, **named)
