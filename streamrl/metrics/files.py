"""Files of a run directory: replaced whole or not at all, appended to in whole lines, read past what is damaged."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from streamrl.errors import CheckpointError, one_sentence

log = logging.getLogger(__name__)

T = TypeVar("T")
_PIECE = 1 << 16


def private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read if it is made, whatever the umask is: for `open(opener=...)`."""
    return os.open(path, flags, 0o600)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write beside `path` and move it there, so that no reader sees half a file and a full disk leaves the old one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb", opener=private) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines, or nothing. Raises OSError.

    A line without its end, left by a process that died in it, is cut off first, and so is what a failed write leaves:
    a torn line never stays in the middle of a file.
    """
    with open(path, "a+b", buffering=0, opener=private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ranks share some files
        end = _end_of_lines(file)
        if file.seek(0, os.SEEK_END) > end:
            file.truncate(end)
        try:
            left = memoryview(lines)
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):  # the next call tries again
                file.truncate(end)
            raise


def _end_of_lines(file: Any) -> int:
    """The size up to the last line that has its end."""
    at = file.seek(0, os.SEEK_END)
    while at:
        begin = max(0, at - _PIECE)
        file.seek(begin)
        if (found := file.read(at - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        at = begin
    return 0


@contextmanager
def if_it_can_be_written(what: str) -> Iterator[None]:
    """A record of the run, no part of it: that it cannot be written, as on a full disk, is told and ends nothing."""
    try:
        yield
    except OSError as error:
        log.error("%s was not written, but the run continues: %s", what, error)


def read_lines(path: Path, parse: Callable[[bytes], T], damaged: list[str] | None = None) -> Iterator[tuple[bytes, T]]:
    """(line, value) of every line of a file that `parse` takes; those for which it raises ValueError are left out.

    These are named in the log and added to `damaged`, as `metrics.jsonl:7 (why)`. A last line without its end is left
    out in silence: it is being written, or was cut short by a crash. So is a file that is missing.
    """
    damaged = [] if damaged is None else damaged
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    value = parse(line)
                except (ValueError, RecursionError) as error:
                    damaged.append(f"{path.name}:{number} ({str(error)[:120]})")
                else:
                    yield line, value
    except FileNotFoundError:
        return
    except OSError as error:
        damaged.append(one_sentence(error))
    if damaged:
        log.warning("left out of %s, because damaged: %s", path.parent, in_short(damaged))


def in_short(damaged: Sequence[str]) -> str:
    """The first, and how many more."""
    return damaged[0] + (f", and {len(damaged) - 1} more" if len(damaged) > 1 else "")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if the file is missing, cannot be read or was cut short by a crash."""
    try:
        return read_object_of(path)
    except CheckpointError:
        return {}


def read_object_of(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError: there is none in this file."""
    try:
        found = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(one_sentence(error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): was it edited or cut short? Restore it") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object: was it edited? Restore it")
    return found


def parse_json(data: str | bytes) -> Any:
    """A JSON value. Raises ValueError, also for whole numbers beyond 64 bits: no run counts so far."""
    return json.loads(data, parse_int=_counted)


def _counted(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (found := int(digits)) < 1 << 64:
        raise ValueError(f"{digits[:20]}... is too large")
    return found


def text_of(path: Path) -> str:
    """The text of a file that people or programs wrote; "" if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
