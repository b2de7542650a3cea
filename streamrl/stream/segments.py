"""The files of a log: `stream/00000001.seg` and on, each a header and then records, read past a torn end.

Only what was written at once, and never acknowledged, can be torn: the process died meanwhile, or the power went and
left holes. That is passed over. It is damage, an error that names file and place, where the log itself (a later record,
a later file) or its mark says that these records were on the disk.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import xxhash

from streamrl.stream.records import OLD_HEADER, Buffer, Form, LogError, Record, decode

FOLDER = "stream"
"""In the run directory."""
MAGIC, OLD_MAGIC = b"SRLSTRM2", b"SRLSTRM1"
SEGMENT_HEADER = struct.Struct("<8sQQQQ")
"""Magic with the format's number; the first record; the number after the last one in the files before, lower than the
first where a start knew that some are missing; what digests of headers begin with; the digest of all this."""
ANYWHERE = 1 << 62
"""For `complete_from`: no record is needed."""
OLD_SEGMENT_HEADER = struct.Struct("<8sQ")
COMMIT_BYTES = 16 << 20
"""Written at once at most, but for a record that alone is larger: more was never cut by a crash."""


class DamagedLogError(LogError):
    """Records that were acknowledged cannot be read, or it is unknown whether they were.

    Attributes:
        path, at: the first byte that cannot be relied on.
    """

    def __init__(self, text: str, path: Path, at: int) -> None:
        super().__init__(
            f"{path}, byte {at}: {text}. Put the file back from a copy; without one, streamrl stream RUN --repair cuts "
            "the log there, and keeps what it cuts"
        )
        self.path, self.at = path, at


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the log.

    Attributes:
        previous: the number after the last record in the files before it.
        begin: where its first record begins.
    """

    path: Path
    first: int
    previous: int
    form: Form
    begin: int


class Place(NamedTuple):
    """A whole record in a file, whose digest was right when it was scanned."""

    sequence: int
    kind: int
    path: Path
    at: int
    size: int
    form: Form


def segment_header(first: int, previous: int, salt: int) -> bytes:
    """The first bytes of a segment."""
    fields = SEGMENT_HEADER.pack(MAGIC, first, previous, salt, 0)[:-8]
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def segments(run_dir: Path | str) -> list[Segment]:
    """The log's files in order; empty for a run without one.

    Raises LogError: a file is no segment, or its header is damaged; or no file is left of a log that had records.
    """
    folder = Path(run_dir) / FOLDER
    durable, found, empty = read_mark(folder), [], None
    for path in sorted(folder.glob("*.seg")):
        with path.open("rb") as file:
            raw = file.read(SEGMENT_HEADER.size + OLD_HEADER.size)
        one = _segment(path, raw)
        if one is None:
            empty = path
            continue
        if empty is not None and not found and one.first > 1 and one.form.salt is not None:
            raise DamagedLogError(f"the file is empty, and the one after it begins with record {one.first}", empty, 0)
        found.append(one)
    if durable and not found:
        raise DamagedLogError(f"no record is left of the {durable} that were on the disk", folder / MARK, 0)
    return found


def _segment(path: Path, raw: bytes) -> Segment | None:
    """A file by its first bytes; None: its maker died before the first record."""
    if raw.startswith(OLD_MAGIC) and len(raw) >= OLD_SEGMENT_HEADER.size:
        _, first = OLD_SEGMENT_HEADER.unpack_from(raw)
        form, begin = Form(None), OLD_SEGMENT_HEADER.size
        header = form.header(raw, begin)
        if header is not None and header.sequence != first:
            raise DamagedLogError(f"its header names record {first}, and {header.sequence} comes first", path, 0)
        return Segment(path, first, first, form, begin)
    if len(raw) < SEGMENT_HEADER.size or not any(raw):
        return None
    magic, first, previous, salt, _ = SEGMENT_HEADER.unpack_from(raw)
    if raw[: SEGMENT_HEADER.size] != segment_header(first, previous, salt):
        what = "the header of the file is damaged"
        if magic != MAGIC:
            what = f"the file begins with {magic!r}, a segment of this format with {MAGIC!r}"
        raise DamagedLogError(what, path, 0)
    return Segment(path, first, previous, Form(salt), SEGMENT_HEADER.size)


def read_records(run_dir: Path | str, first: int = 1, *, complete_from: int = 0) -> Iterator[tuple[int, Record]]:
    """Yield (sequence, record) of the log in order, from a sequence number on; kinds of later releases are left out.

    Args and Raises: as `scan`.
    """
    for place, view in scan(run_dir, first, complete_from=complete_from):
        body = decode(view, place.form, place)
        if body is not None:
            yield place.sequence, body


def read_at(place: Place) -> Record:
    """The record at a place that was scanned before. Raises LogError: it has changed since."""
    with place.path.open("rb") as file:
        file.seek(place.at)
        data = file.read(place.size)
    header, expected = place.form.header(data, 0), (place.size, place.kind, place.sequence)
    if header is None or header[:3] != expected or not place.form.whole(data, 0, header):
        raise LogError(f"{place.path}, byte {place.at}: record {place.sequence} is not there any more")
    body = decode(data, place.form, place)
    assert body is not None
    return body


def scan(run_dir: Path | str, first: int = 1, *, complete_from: int = 0) -> Iterator[tuple[Place, memoryview]]:
    """Yield place and bytes of the log's records in order, from a sequence number on; the bytes hold until the next.

    Args:
        complete_from: records before this one may be missing where a start has said so: a checkpoint knows them.
    Raises:
        LogError: an acknowledged record is damaged, or some are missing in between or at the end.
    """
    durable = read_mark(Path(run_dir) / FOLDER)  # before the files: a hub may write them just now
    files = segments(run_dir)
    expected: int | None = None
    for one, following in pairwise([*files, None]):
        assert one is not None
        if following is not None and following.first <= first:
            continue
        if expected is not None and one.first != expected:
            if one.first > max(first, complete_from) or one.previous != expected:
                raise DamagedLogError(
                    f"it begins at record {one.first}, the one before ends at {expected - 1}", one.path, 0
                )
        expected = one.first
        for found, view in scan_segment(one, durable if following is None else following.previous - 1):
            expected += 1
            if found.sequence >= first:
                yield found, view


def scan_segment(segment: Segment, durable: int) -> Iterator[tuple[Place, memoryview]]:
    """Yield place and bytes of the whole records of one file; a torn end is passed over.

    The bytes hold until the next record.

    Args:
        durable: records up to this one were on the disk, as others say.
    Raises:
        LogError: one of those cannot be read, or one that the file itself shows to be such.
    """
    path, form, at, expected = segment.path, segment.form, segment.begin, segment.first
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while at < num_bytes:
                header = form.header(data, at)
                if header is None or not form.whole(data, at, header):
                    _refuse_damage(data, segment, at, expected, durable)
                    return
                if header.sequence != expected:
                    raise DamagedLogError(f"record {header.sequence} stands where {expected} should", path, at)
                with memoryview(data)[at : at + header.size] as view:
                    yield Place(expected, header.kind, path, at, header.size, form), view
                at, expected = at + header.size, expected + 1
    if expected <= durable:
        raise DamagedLogError(
            f"the file ends with record {expected - 1}, and records up to {durable} were on the disk: it was cut, or "
            "the one after it is missing", path, at,
        )


def _refuse_damage(data: Buffer, segment: Segment, at: int, expected: int, durable: int) -> None:
    """Raise LogError unless what cannot be read is what a crash leaves: one write, not yet acknowledged."""
    form, why = segment.form, ""
    if expected <= durable:
        why = f"records up to {durable} were on the disk"
    else:
        for place, header in form.later(data, at, expected):
            if header.synced >= expected or form.salt is None:
                why = f"record {header.sequence} follows it at byte {place}"
                break
    torn = data[at:].rstrip(b"\0")
    header = form.header(data, at)
    if not why and len(torn) > max(COMMIT_BYTES, header.size if header is not None and form.salt is not None else 0):
        why = f"{len(torn)} bytes follow, more than one write of the log"
    if why:
        raise DamagedLogError(f"record {expected} is damaged, and {why}", segment.path, at)


def whole_end(segment: Segment, durable: int) -> tuple[int, int]:
    """(bytes up to the end of the last whole record, sequence number after it); of the last file of a log.

    Args and Raises: as `scan_segment`.
    """
    end, following = segment.begin, segment.first
    for place, _ in scan_segment(segment, durable):
        end, following = place.at + place.size, place.sequence + 1
    return end, following


# --- the mark ---------------------------------------------------------------------------------------------------------

# A file next to the log: how far it is on the disk, so that no acknowledged record vanishes unnoticed. The log's end
# alone does not say whether more was there. The writer notes the newest record that it has synced before it
# acknowledges any of it; two places take turns, so that a write that is torn leaves the one before. The note itself is
# not synced: after a power cut it may be an older one, which says less and nothing wrong.


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
