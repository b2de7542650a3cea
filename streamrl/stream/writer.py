"""Appending to a run's log: one thread writes and syncs what was appended meanwhile (group commit).

`append` never waits. A record is durable once `durable` has reached its number: with fsync=interval every 50 ms or
16 MiB, with always as soon as it is written; never leaves that to the operating system. What cannot be written, as on a
full disk, is tried again every second, and nothing is lost; `failure` says why meanwhile. `repair` cuts a damaged log
at the damage, so that its run can go on: nothing is deleted, and a person has asked for it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from streamrl.stream.records import HEADER, TRAILER, Form, LogError, Record, encode
from streamrl.stream.segments import (
    ANYWHERE,
    COMMIT_BYTES,
    FOLDER,
    DamagedLogError,
    Mark,
    read_mark,
    scan,
    segment_header,
    segments,
    whole_end,
    write_mark,
)

log = logging.getLogger(__name__)

SYNC_S, SYNC_BYTES = 0.05, COMMIT_BYTES
SEGMENT_BYTES = 64 << 20
RETRY_S = 1.0
Fsync = Literal["interval", "always", "never"]


class LogWriter:
    """The one writer of a log.

    It begins a new file, after the end of the last one (`close_log`).

    Args:
        run_dir: the log is in its folder `stream`.
        next_sequence: of its first record, at least the one after the log's last; None is that one.
    """

    def __init__(
        self, run_dir: Path | str, *, next_sequence: int | None = None, fsync: Fsync = "interval",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fsync, self._segment_bytes = fsync, segment_bytes
        following, self._number = close_log(run_dir)
        self._previous = following
        self.next_sequence = following if next_sequence is None else next_sequence
        if self.next_sequence < following:
            raise LogError(
                f"the log of {run_dir} goes on to record {following - 1}, which cannot be read here: a later release "
                "wrote it; continue with that one"
            )
        self.durable = self.next_sequence - 1
        """The newest sequence number that survives a crash."""
        self.failure = ""
        """Why nothing can be written; "" while that goes well."""
        self._mark = Mark(self._folder)
        self._waiting: deque[_Waiting] = deque()
        self._num_waiting = 0  # bytes
        self._changed = threading.Condition()
        self._closing = False
        self._file: BlockFile | None = None
        self._form = Form(0)  # of that file
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def append(self, body: Record) -> int:
        """Queue a record; returns its sequence number."""
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        one = _Waiting(sequence, body.KIND, encode(sequence, body))
        with self._changed:
            self._waiting.append(one)
            self._num_waiting += one.size
            if len(self._waiting) == 1 or self._num_waiting >= SYNC_BYTES:
                self._changed.notify()
        return sequence

    def remove_before(self, sequence: int, *, to_bytes: int | None = None) -> int:
        """Remove files whose records all lie before this one, the oldest first; returns how many.

        Args:
            to_bytes: only as many as it takes for the log to be no larger.
        """
        files = segments(self._folder.parent)
        sizes = [one.path.stat().st_size for one in files]
        total, num = sum(sizes), 0
        for one, following, size in zip(files, files[1:], sizes, strict=False):
            if following.first > sequence or (to_bytes is not None and total <= to_bytes):
                break
            with suppress(FileNotFoundError):
                one.path.unlink()
            total, num = total - size, num + 1
        return num

    def close(self) -> None:
        """Write and sync what was appended, if that is possible now."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                last = self._closing  # an attempt that began before has another one
            began = time.monotonic()
            try:
                self._commit()
            except OSError as error:
                if not self.failure:
                    log.warning("the log cannot be written: %s", error)
                self.failure = str(error)
                self._drop_file()
                with self._changed:
                    if last:
                        log.error("%d records of the log could not be written: %s", len(self._waiting), error)
                        break
                    self._changed.wait_for(lambda: self._closing, RETRY_S)
                continue
            self.failure = ""
            if self._fsync == "interval" and not self._closing:  # more comes meanwhile, and shares the next fsync
                left = SYNC_S - (time.monotonic() - began)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._num_waiting >= SYNC_BYTES, max(0.0, left))
        if self._file is not None:
            self._file.close()
        self._mark.close()

    def _commit(self) -> None:
        """Write what waits now, and sync it. Raises OSError, with the file as it was before."""
        batch = self._next_batch()
        if self._file is None or self._file.end >= self._segment_bytes:
            self._begin_segment(batch[0].sequence)
        file = self._file
        assert file is not None
        synced = self.durable
        file.append(
            [data for one in batch for data in (one.header(self._form, synced), *one.parts)],
            sync=self._fsync != "never",
        )
        with self._changed:
            for one in batch:
                self._waiting.popleft()
                self._num_waiting -= one.size
        self._previous = batch[-1].sequence + 1
        try:
            self._mark.put(batch[-1].sequence)
        except OSError as error:  # the records are there; only what would show their loss is not
            log.warning("how far the log is on the disk cannot be noted: %s", error)
        self.durable = batch[-1].sequence

    def _next_batch(self) -> list[_Waiting]:
        """The records of the next write: up to `SYNC_BYTES` of those that wait, and at least one."""
        batch, size = [], 0
        with self._changed:
            for one in self._waiting:
                size += one.size
                if batch and size > SYNC_BYTES:
                    break
                batch.append(one)
        return batch

    def _begin_segment(self, first: int) -> None:
        """Begin a file; its name is durable before any record in it is."""
        if self._file is not None:
            self._file.close()
            self._file = None
        path = self._folder / f"{self._number:08d}.seg"
        file, salt = BlockFile(path), int.from_bytes(os.urandom(8), "little")
        try:
            file.append([segment_header(first, self._previous, salt)])
            handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError:
            file.close()
            with suppress(OSError):
                path.unlink()
            raise
        self._file, self._form, self._number = file, Form(salt), self._number + 1

    def _drop_file(self) -> None:
        """Cut off what a failed write left, so that the next one continues at the end of a whole record."""
        if self._file is None:
            return
        try:
            self._file.cut()
        except OSError:  # a file that cannot even be cut is left with its torn end; the next one begins here
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A record that is not written yet; its header is made when it is."""

    sequence: int
    kind: int
    parts: list[bytes]

    @property
    def size(self) -> int:
        return HEADER.size + sum(map(len, self.parts))

    def header(self, form: Form, synced: int) -> bytes:
        return form.pack(self.sequence, self.kind, sum(map(len, self.parts)) - TRAILER.size, synced)


def close_log(run_dir: Path | str) -> tuple[int, int]:
    """Cut off a torn end, which no actor was told of, and keep it; the rest is durable then.

    Returns:
        next sequence number, number of the next file.
    Raises:
        LogError: what would be cut was acknowledged, or may have been.
        OSError: it cannot be kept.
    """
    folder = Path(run_dir) / FOLDER
    durable, files = read_mark(folder), segments(run_dir)
    number = max((int(one.path.stem) for one in files if one.path.stem.isdigit()), default=0) + 1
    end, following = whole_end(files[-1], durable) if files else (0, 1)  # before anything is changed
    for path in folder.glob("*.seg"):
        if path not in [one.path for one in files]:  # its maker died before the first record
            cut_file(path, 0)
            path.unlink()
    if not files:
        return 1, number
    if end < files[-1].path.stat().st_size:
        kept = cut_file(files[-1].path, end)
        if kept is not None:
            log.warning("the log ended in a torn write, which was never acknowledged: cut off, and kept in %s", kept)
    with files[-1].path.open("rb+") as file:  # what a dead hub wrote and did not sync is relied on from here on
        sync_data(file.fileno())
    return following, number


def cut_file(path: Path, end: int) -> Path | None:
    """Cut a file of the log, and keep the bytes in another one beside it; None if there are none but zeros."""
    with path.open("rb") as file:
        file.seek(end)
        torn = file.read().rstrip(b"\0")  # zeros fill the last block of a file that is being written
    kept = None
    if torn:
        kept = new_path(path.with_name(f"{path.stem}.cut-{end}"))
        with kept.open("xb") as file:
            file.write(torn)
            file.flush()
            os.fsync(file.fileno())
    os.truncate(path, end)
    return kept


def new_path(path: Path) -> Path:
    """This path, or with a number after it where it is taken."""
    names = (path.with_name(f"{path.name}-{number}" if number else path.name) for number in count())
    return next(one for one in names if not one.exists())


# --- repair -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair.

    Attributes:
        why: what was damaged first.
        kept: files that hold what was cut.
        last: the last record that is left.
    """

    why: str
    kept: tuple[Path, ...]
    last: int


def repair(run_dir: Path) -> Repaired | None:
    """Cut a log at its first damage; None if it has none. No process may write it meanwhile.

    Raises OSError: something cannot be kept; doing it again goes on from there.
    """
    folder = run_dir / FOLDER
    found, kept = _damage(run_dir), []
    why = str(found)
    if found is None:
        return None
    while found is not None:
        path, at = found.path, found.at
        for one in sorted(folder.glob("*.seg"), reverse=True):
            if one.name > path.name or (one == path and at == 0):
                kept.append(one.rename(new_path(one.with_suffix(".cut"))))
            elif one == path:
                kept.append(cut_file(path, at))
        write_mark(folder, 0)  # what it says is told in `why`; from here on it is about what is left
        found = _damage(run_dir)
    following, _ = close_log(run_dir)
    write_mark(folder, following - 1)
    return Repaired(why, tuple(sorted(one for one in kept if one is not None)), following - 1)


def _damage(run_dir: Path) -> DamagedLogError | None:
    try:
        for _ in scan(run_dir, complete_from=ANYWHERE):
            pass
    except DamagedLogError as error:
        return error
    return None


# --- the file ---------------------------------------------------------------------------------------------------------

# A log is written once and read after a crash. Through the page cache, copying, tracking and flushing its pages cost
# ten times the CPU time of the transfer itself, which the hub needs for its messages.


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
            sync_data(self._fd)
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


def sync_data(handle: int) -> None:
    """Bring the file's bytes to the disk; macOS has one call for them and their date."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(handle)
