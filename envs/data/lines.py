"""JSON Lines read by offset: opening a file of a million records reads it once for its line ends, and parses nothing.

Every record is exactly what its line says, and an error names that line. Reads are `os.pread`: they share no position,
so threads may read at once, and a file that shrinks meanwhile is an error; with a memory map it would be a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from envs.data.shapes import MISSING
from streamrl.errors import DataChangedError, TaskError

CHUNK_BYTES = 1 << 24
BOM = b"\xef\xbb\xbf"


class JsonLines:
    """A file with one JSON object per line; blank lines are no records."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self._file = name, -1
        self._file = os.open(path, os.O_RDONLY)
        self._read_as = self._stamp()
        self._starts, self._ends, self._lines = _line_ranges(self._file)
        self._digests = np.zeros(0, np.uint64)  # of every line, once `field` has read them all

    def __len__(self) -> int:
        return len(self._starts)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def where(self, index: int) -> str:
        """File, record and, if blank lines make it another number, line; for messages."""
        number, line = index + 1, int(self._lines[index]) + 1
        return f"{self.name}, record {number}" + (f" (line {line})" if line != number else "")

    def row(self, index: int) -> dict[str, Any]:
        """The record at `index`. Raises TaskError naming file and record."""
        start, end = int(self._starts[index]), int(self._ends[index])
        line = os.pread(self._file, end - start, start)
        if self._stamp() != self._read_as and not self._is_as_read(index, line):
            raise DataChangedError(
                f"{self.where(index)}: the file was changed while the run used it ({self._read_as[0]:,} bytes at the "
                f"start, {self._stamp()[0]:,} now). Put it back as it was, then go on: streamrl resume"
            )
        return self._parsed(index, line)

    def _stamp(self) -> tuple[int, int]:
        """Size and time of the last write."""
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def _is_as_read(self, index: int, line: bytes) -> bool:
        """Records may have been added behind those that are known."""
        return index < len(self._digests) and int(self._digests[index]) == xxhash.xxh3_64_intdigest(line)

    def field(self, key: str) -> Iterator[Any]:
        """One field of every record in order, without building the rest; see `Source.field`."""
        wanted = msgspec.defstruct("Wanted", [("value", Any)], rename={"value": key})
        decode = msgspec.json.Decoder(wanted).decode
        digests = np.zeros(len(self), np.uint64)
        for index, line in enumerate(self._texts()):
            digests[index] = xxhash.xxh3_64_intdigest(line)
            try:
                yield decode(line).value
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # no such field, or no JSON object at all
                try:
                    yield self._parsed(index, line).get(key, MISSING)
                except TaskError as error:
                    yield error
        self._digests = digests

    def _texts(self) -> Iterator[bytes]:
        """All lines, in reads of many."""
        first, total = 0, len(self)
        while first < total:
            start = int(self._starts[first])
            last = max(first + 1, int(np.searchsorted(self._ends, start + CHUNK_BYTES)))
            block = os.pread(self._file, int(self._ends[last - 1]) - start, start)
            for i in range(first, last):
                yield block[int(self._starts[i]) - start : int(self._ends[i]) - start]
            first = last

    def _parsed(self, index: int, line: bytes) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(line)
        except UnicodeDecodeError as error:
            raise TaskError(f"{self.where(index)}: not UTF-8 text ({error.reason}): save the file as UTF-8.") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise TaskError(f"{self.where(index)}: not JSON ({error}): {_excerpt(line)}") from error
        if not isinstance(found, dict):
            raise TaskError(f"{self.where(index)}: a {type(found).__name__}, not an object: {_excerpt(line)}")
        return found


def _line_ranges(file: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and end offset [N] of every line that is not blank, and its number in the file."""
    breaks, base = [], 0
    while chunk := os.pread(file, CHUNK_BYTES, base):
        breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + base)
        base += len(chunk)
    ends = np.concatenate([*breaks, [base]]).astype(np.int64)
    starts = np.concatenate([[len(BOM) if os.pread(file, 3, 0) == BOM else 0], ends[:-1] + 1]).astype(np.int64)
    full = ends > starts
    for i in np.flatnonzero(full & (ends - starts < 16)):  # an object with a prompt is longer
        full[i] = bool(os.pread(file, int(ends[i] - starts[i]), int(starts[i])).strip())
    lines = np.flatnonzero(full)
    return starts[lines], ends[lines], lines


def _excerpt(line: bytes) -> str:
    return line[:80].decode("utf-8", "replace")
