"""The mark, a file next to the log: how far it is on the disk, so that no acknowledged record vanishes unnoticed.

The log's end alone does not say whether more was there. The writer notes the newest record that it has synced before it
acknowledges any of it; two places take turns, so that a write that is torn leaves the one before. The note itself is
not synced: after a power cut it may be an older one, which says less and nothing wrong.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

import xxhash

log = logging.getLogger(__name__)

MARK = "durable"
"""In the folder of the log."""
_FIELDS = struct.Struct("<8sQQ")
_MAGIC = b"SRLMARK1"
_PLACES = (0, 512)
"""Apart by what a disk writes at once."""


class Mark:
    """The note of one writer; nothing is made before the first record is on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._num_written = 0

    def put(self, sequence: int) -> None:
        """Note that records up to this one are on the disk. Raises OSError."""
        if self._fd is None:
            write_mark(self._folder, sequence)
            self._fd = os.open(self._folder / MARK, os.O_WRONLY)
        os.pwrite(self._fd, _packed(sequence), _PLACES[self._num_written % len(_PLACES)])
        self._num_written += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def write_mark(folder: Path, sequence: int) -> None:
    """Replace the note by one of this number, also a lower one. Raises OSError."""
    beside = folder / f"{MARK}.new"
    with beside.open("wb") as file:
        for place in _PLACES:
            file.seek(place)
            file.write(_packed(sequence))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / MARK)


def read_mark(folder: Path) -> int:
    """The newest record that was on the disk as far as the note says; 0 without one."""
    try:
        data = (folder / MARK).read_bytes()
    except FileNotFoundError:
        return 0
    found = [_unpacked(data[place : place + _FIELDS.size]) for place in _PLACES]
    if None in found:
        log.warning("%s is damaged: it may say less than it did of how far the log was on the disk", folder / MARK)
    return max(one or 0 for one in found)


def _packed(sequence: int) -> bytes:
    digest = xxhash.xxh3_64_intdigest(struct.pack("<Q", sequence), seed=int.from_bytes(_MAGIC, "little"))
    return _FIELDS.pack(_MAGIC, sequence, digest)


def _unpacked(data: bytes) -> int | None:
    sequence = _FIELDS.unpack(data)[1] if len(data) == _FIELDS.size else 0
    return sequence if data == _packed(sequence) else None
