"""The files of a log: `stream/00000001.seg` and on, each a header and then records, read past a torn end.

Only the last record of a start can be torn: the process died while it was written. It was never acknowledged, so it is
passed over. Damage anywhere else is an error that names the file and the place.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from streamrl.stream.records import HEADER, LogError, Record, check, decode, size_of

FOLDER = "stream"
"""In the run directory."""
MAGIC = b"SRLSTRM1"
SEGMENT_HEADER = struct.Struct("<8sQ")
"""Magic with the format's number, and the sequence number of the first record."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the log."""

    path: Path
    first: int


def segments(run_dir: Path | str) -> list[Segment]:
    """The log's files in order; empty for a run without one. Raises LogError for a file that is no segment."""
    found = []
    for path in sorted((Path(run_dir) / FOLDER).glob("*.seg")):
        with path.open("rb") as file:
            header = file.read(SEGMENT_HEADER.size)
        if len(header) < SEGMENT_HEADER.size:
            continue  # its maker died before the first record
        magic, first = SEGMENT_HEADER.unpack(header)
        if magic != MAGIC:
            raise LogError(f"{path} begins with {magic!r}, a segment of this format with {MAGIC!r}")
        found.append(Segment(path, first))
    return found


def read_records(run_dir: Path | str, first: int = 1) -> Iterator[tuple[int, Record]]:
    """Yield (sequence, record) of the log in order, from a sequence number on; kinds of later releases are left out.

    Raises LogError: as `scan`.
    """
    for place, view in scan(run_dir, first):
        body = decode(view)
        if body is not None:
            yield place.sequence, body


def read_at(place: Place) -> Record:
    """The record at a place that was scanned before. Raises LogError: it has changed since."""
    with place.path.open("rb") as file:
        file.seek(place.at)
        data = file.read(place.size)
    if len(data) < place.size or check(data) != (place.sequence, place.kind):
        raise LogError(f"{place.path}, byte {place.at}: record {place.sequence} is not there any more")
    body = decode(data)
    assert body is not None
    return body


def scan(run_dir: Path | str, first: int = 1) -> Iterator[tuple[Place, memoryview]]:
    """Yield place and bytes of the log's records in order, from a sequence number on; the bytes hold until the next.

    Raises LogError: a record is damaged that is not the last of its start, or some are missing in between.
    """
    files = segments(run_dir)
    expected: int | None = None
    for place, segment in enumerate(files):
        if place + 1 < len(files) and files[place + 1].first <= first:
            continue
        if expected is not None and segment.first != expected:
            raise LogError(f"{segment.path} begins at record {segment.first}, the one before ends at {expected - 1}")
        expected = segment.first
        for found, view in scan_segment(segment.path):
            if found.sequence != expected:
                raise LogError(f"{segment.path}: record {found.sequence} stands where {expected} should")
            expected += 1
            if found.sequence >= first:
                yield found, view


class Place(NamedTuple):
    """A whole record in a file, whose digest was right when it was scanned."""

    sequence: int
    kind: int
    path: Path
    at: int
    size: int


def scan_segment(path: Path) -> Iterator[tuple[Place, memoryview]]:
    """Yield place and bytes of the whole records of one file; a torn end is passed over.

    The bytes hold until the next record. Raises LogError for damage before the end.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= SEGMENT_HEADER.size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = SEGMENT_HEADER.size
            while at < len(data):
                size = size_of(data[at : at + HEADER.size]) if at + HEADER.size <= len(data) else len(data)
                if size is None:
                    if not any(data[at:]):
                        return  # torn: the file grew, and the bytes never came
                    raise LogError(f"{path}, byte {at}: no record begins here")
                if at + size > len(data):
                    return  # torn
                with memoryview(data)[at : at + size] as view:
                    try:
                        sequence, kind = check(view)
                    except LogError as error:
                        if at + size == len(data):
                            return  # torn
                        raise LogError(f"{path}, byte {at}: {error}") from error
                    yield Place(sequence, kind, path, at, size), view
                at += size


def whole_end(path: Path) -> tuple[int, int]:
    """(bytes up to the end of the last whole record, sequence number after it); of the last file of a log."""
    with path.open("rb") as file:
        _, following = SEGMENT_HEADER.unpack(file.read(SEGMENT_HEADER.size))
    end = SEGMENT_HEADER.size
    for place, _ in scan_segment(path):
        end, following = place.at + place.size, place.sequence + 1
    return end, following
