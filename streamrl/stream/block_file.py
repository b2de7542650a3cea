"""An append-only file that is written in whole blocks, past the page cache where its file system allows that.

A log is written once and read after a crash. Through the page cache, copying, tracking and flushing its pages cost
ten times the CPU time of the transfer itself, which the hub needs for its messages.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

BLOCK = 4096
"""Direct writes begin and end at multiples of it, in the file and in memory; no common disk asks for larger ones."""
STAGED = 1 << 20
"""Bytes of one write at most."""


class BlockFile:
    """A new file; until `close`, zeros follow its bytes up to the next block.

    Attributes:
        end: bytes that were appended.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._direct = self._set_direct(True)
        self._memory = mmap.mmap(-1, STAGED)  # begins at a page
        self._staged = memoryview(self._memory)
        self._tail = b""
        self.end = 0

    def append(self, buffers: Sequence[bytes | bytearray], *, sync: bool = False) -> None:
        """Write all of the buffers, and wait with `sync` for the disk.

        Raises OSError: more may stand in the file then, but `end` is where it was (`cut`).
        """
        start, at = self.end - len(self._tail), len(self._tail)
        self._staged[:at] = self._tail
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                num = min(len(left), STAGED - at)
                self._staged[at : at + num] = left[:num]
                left, at = left[num:], at + num
                if at == STAGED:
                    self._write(start, STAGED)
                    start, at = start + STAGED, 0
        whole = at - at % BLOCK
        tail = bytes(self._staged[whole:at])
        if at:
            padded = -(-at // BLOCK) * BLOCK
            self._staged[at:padded] = bytes(padded - at)
            self._write(start, padded)
        if sync:
            os.fdatasync(self._fd)
        self._tail, self.end = tail, start + at

    def cut(self) -> None:
        """Remove what an append that failed left behind the end. Raises OSError."""
        os.ftruncate(self._fd, self.end)

    def close(self) -> None:
        """Close the file, without the zeros at its end if they can be removed."""
        try:
            self.cut()
        except OSError:
            pass  # a reader passes over them
        finally:
            os.close(self._fd)
            self._staged.release()
            self._memory.close()

    def _write(self, start: int, num_bytes: int) -> None:
        try:
            written = os.pwrite(self._fd, self._staged[:num_bytes], start)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = self._set_direct(False)  # it may be opened so, but not written with these blocks
            written = os.pwrite(self._fd, self._staged[:num_bytes], start)
        if written < num_bytes:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {written} of {num_bytes} bytes were written")

    def _set_direct(self, wanted: bool) -> bool:
        flag = getattr(os, "O_DIRECT", 0)  # systems other than Linux have none
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~flag
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (flag if wanted else 0))
        except OSError:
            return False
        return wanted and flag != 0
