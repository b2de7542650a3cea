"""`split@path` becomes a source: records by index, read by what the file is called.

    data.jsonl .ndjson    by offset                         data.csv .tsv            into memory, every field a text
    data.json             a list, or lines after all        data.parquet .arrow      mapped, by the `datasets` library
    folder/               of `save_to_disk`, or of files    owner/name               a data set of the hub
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from envs.data.hub import from_the_cache, hub_answers
from envs.data.shapes import MISSING
from streamrl.errors import DataChangedError, TaskError, install_extra
from streamrl.messages.actors import MAX_RECORD_BYTES
from streamrl.processes import for_all

log = logging.getLogger("streamrl.data")


class Table:
    """A `datasets.Dataset`; rows are the records that JSON Lines of the same would give.

    A column has one type, so a field that one record has is null in all others: null fields are left out at every
    depth. Times are texts, and so are decimals; bytes are left out.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        for column, kind in dataset.features.items():
            if getattr(kind, "decode", False):  # images and audio are not read, and would need packages
                dataset = dataset.cast_column(column, dataclasses.replace(kind, decode=False))
        self.name, self._dataset = name, dataset
        self._files = {one["filename"]: _stamp(one["filename"]) for one in dataset.cache_files}
        held = [field.name for field in dataset.features.arrow_schema if "binary" in str(field.type)]
        if held:
            log.warning("%s: the bytes in %s are left out: JSON cannot carry them", name, ", ".join(held))

    def __len__(self) -> int:
        return len(self._dataset)

    def where(self, index: int) -> str:
        return f"{self.name}, record {index + 1}"

    def row(self, index: int) -> dict[str, Any]:
        for path, before in self._files.items():  # looked at first: a mapped file that was cut short ends the process
            if (now := _stamp(path)) != before and now[:1] == before[:1]:
                raise DataChangedError(
                    f"{self.where(index)}: {path} was changed while the run used it. Put it back as it was, then go "
                    "on: streamrl resume"
                )
        try:
            return _plain(self._dataset[index])
        except Exception as error:  # decoding of images and audio may need packages that are not here
            raise TaskError(f"{self.where(index)}: cannot be read: {type(error).__name__}: {error}") from error

    def field(self, key: str) -> Iterator[Any]:
        if key not in self._dataset.column_names:
            yield from [MISSING] * len(self)
            return
        for batch in self._dataset.select_columns([key]).with_format("arrow").iter(10_000):
            yield from map(_plain, batch.column(key).to_pylist())


def open_table(file: Path, name: str) -> Table:
    """A Parquet or Arrow file. Raises TaskError for a damaged one."""
    datasets = _library()
    try:
        if file.suffix.lower() == ".arrow":
            return Table(datasets.Dataset.from_file(str(file)), name)
        return Table(datasets.load_dataset("parquet", data_files=str(file), split="train"), name)
    except Exception as error:
        raise TaskError(f"{name} is not a readable {file.suffix[1:]} file: {_first_line(error)}") from error


def open_folder(path: str, split: str, setting: str) -> Table:
    """A folder of `save_to_disk`, a folder of data files, or `owner/name[:subset]` on the hub."""
    datasets = _library()
    folder, silent = Path(path).expanduser(), False
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            found = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            found = datasets.load_dataset(str(folder))
        else:
            name, _, subset = path.partition(":")
            silent = not hub_answers()
            with from_the_cache() if silent else for_all():
                return Table(datasets.load_dataset(name, subset or None, split=split), path)
    except Exception as error:
        where = "a folder of data" if folder.is_dir() else "a file here, nor a data set that the hub gives"
        where += " (it does not answer, and the cache on this machine has none)" if silent else ""
        raise TaskError(
            f"{setting} is not {where}: {_first_line(error)}. Give a file, a folder of data files or of save_to_disk, "
            "or the name of a data set of the hub (owner/name, online or in its cache)."
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        if split != "train":
            raise TaskError(f"{setting}: this folder holds one data set without splits: leave `{split}@` out.")
        return Table(found, path)
    if split not in found:
        raise TaskError(f"{setting}: no split {split!r}; it has {', '.join(found)}: write {next(iter(found))}@{path}.")
    return Table(found[split], f"{split}@{path}")


def _library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise TaskError(
            f"Parquet, Arrow, folders and hub data sets need {error.name}; install it with {install_extra('data')} "
            "(JSON, JSON Lines and CSV need nothing)."
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _stamp(path: str) -> tuple[int, ...]:
    """Identify the file by inode, size and time; () if there is none: what is mapped stays readable."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def _plain(value: Any) -> Any:
    """A value as JSON has it; None for what it cannot have, such as the NaN that marks a missing number."""
    match value:
        case dict():
            return {key: plain for key, one in value.items() if (plain := _plain(one)) is not None}
        case list() | tuple():
            return [_plain(one) for one in value]
        case bytes():
            return None
        case float():
            return value if math.isfinite(value) else None
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta() | Decimal():
            return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}".rstrip(": .")


CHUNK_BYTES = 1 << 24
BOM = b"\xef\xbb\xbf"


class JsonLines:
    """A file with one JSON object per line, read by offset; blank lines are no records.

    Opening a file of a million records reads it once for its line ends, and parses nothing. Every record is exactly
    what its line says, and an error names that line. Reads are `os.pread`: they share no position, so threads may read
    at once, and a file that shrinks meanwhile is an error; with a memory map it would be a crash.
    """

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
        """The field of every record in order, without building the rest; see `Source.field`."""
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
        """Yield all lines, many of them a read."""
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
    breaks, indented, base, before = [], [np.zeros(1, np.int64)], 0, b""
    while chunk := os.pread(file, CHUNK_BYTES, base):
        found = np.frombuffer(before + chunk, np.uint8)
        breaks.append(np.flatnonzero(found[len(before) :] == 10) + base)
        indented.append(np.flatnonzero((found[:-1] == 10) & (found[1:] <= 32)) + 1 + base - len(before))
        base, before = base + len(chunk), chunk[-1:]
    ends = np.concatenate([*breaks, [base]]).astype(np.int64)
    starts = np.concatenate([[len(BOM) if os.pread(file, 3, 0) == BOM else 0], ends[:-1] + 1]).astype(np.int64)
    full = ends > starts
    may_be_blank = (ends - starts < 16) | np.isin(starts, np.concatenate(indented))  # an object with a prompt is longer
    may_be_blank[0] = True
    for i in np.flatnonzero(full & may_be_blank):
        full[i] = bool(os.pread(file, int(ends[i] - starts[i]), int(starts[i])).strip())
    lines = np.flatnonzero(full)
    return starts[lines], ends[lines], lines


def _excerpt(line: bytes) -> str:
    return line[:80].decode("utf-8", "replace")


DEFAULT_SPLIT = "train"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


class Source(Protocol):
    """Records by index."""

    name: str

    def __len__(self) -> int: ...

    def where(self, index: int) -> str:
        """The file and the number of a record, for messages."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """A copy of the record. Raises TaskError naming file and record if it cannot be read."""
        ...

    def field(self, key: str) -> Iterator[Any]:
        """The field of every record in order; MISSING where there is none, an error where there is no record."""
        ...


class Rows:
    """Records in memory; an error stands for one that could not be read."""

    def __init__(self, rows: list[Any], name: str) -> None:
        self.name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"{self.name}, record {index + 1}"

    def row(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if isinstance(row, TaskError):
            raise row
        if not isinstance(row, dict):
            raise TaskError(f"{self.where(index)}: a {type(row).__name__}, not an object: {row!r:.80}")
        return dict(row)

    def field(self, key: str) -> Iterator[Any]:
        for index, row in enumerate(self._rows):
            try:
                yield row.get(key, MISSING) if isinstance(row, dict) else self.row(index)
            except TaskError as error:
                yield error


def open_source(text: str, *, setting: str) -> Source:
    """The records that `split@path` names.

    Args:
        text: a path or hub name, with a split and an @ before it if it should not be `train`.
        setting: the key that holds it, for messages.
    Raises:
        TaskError: no such file, a kind of file that is not read, a damaged one, or one without records.
    """
    split, path = split_of(text)
    file = Path(path).expanduser()
    try:
        source = _open(file, path, split, f"{setting}={text}")
    except OSError as error:
        raise TaskError(f"{setting}={text} cannot be read: {error}") from error
    if not len(source):
        raise TaskError(f"{setting}={text} holds no records.")
    return source


def split_of(text: str) -> tuple[str | None, str]:
    """`test@data.json` as ("test", "data.json"); the split is None if there is none."""
    before, at, after = text.partition("@")
    is_split = bool(at) and re.fullmatch(r"[\w.\[\]:%+-]+", before) is not None and not Path(text).exists()
    return (before, after) if is_split else (None, text)


def absolute(paths: Any) -> Any:
    """The same path or list of paths with files and folders of this machine made absolute."""
    if isinstance(paths, list):
        return [absolute(path) for path in paths]
    if not isinstance(paths, str):
        return paths
    split, path = split_of(paths)
    file = Path(path).expanduser()
    return f"{split}@{file.resolve()}" if split and file.exists() else str(file.resolve()) if file.exists() else paths


def _open(file: Path, path: str, split: str | None, setting: str) -> Source:
    if file.is_dir() or (not file.exists() and HUB_NAME.fullmatch(path) and file.suffix not in READERS):
        return open_folder(path, split or DEFAULT_SPLIT, setting)
    if not file.is_file():
        raise TaskError(f"{setting}: no such file (looked at {file.resolve()}).")
    read = READERS.get(file.suffix.lower())
    if read is None:
        raise TaskError(
            f"{setting} is not a file of records: its name must end in {', '.join(READERS)}"
            f"{'; unpack it first' if file.suffix in ('.gz', '.zip', '.zst', '.bz2', '.xz') else ''}."
        )
    if split not in (None, DEFAULT_SPLIT):
        raise TaskError(f"{setting}: a single file has no split {split!r}; name another file, or leave `{split}@` out.")
    return read(file, file.name)


def _read_json(file: Path, name: str) -> Source:
    text = file.read_bytes().lstrip(b"\xef\xbb\xbf").lstrip()
    if not text.startswith(b"["):
        return JsonLines(file, name)  # many files with one object per line are called .json
    try:
        return Rows(json.loads(text), name)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{name} is not JSON: {error}. Write a list of objects, or an object on each line.") from error


def _read_csv(file: Path, name: str) -> Source:
    rows: list[Any] = []
    csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))  # longer ones are refused as what they are
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            if (columns := reader.fieldnames) is None or len(set(columns)) < len(columns) or not all(columns):
                raise TaskError(f"{name} must begin with a line of distinct column names, got {columns}.")
            for row in reader:
                if None in row or None in row.values():
                    many = "more" if None in row else "fewer"
                    rows.append(TaskError(
                        f"{name}, record {len(rows) + 1} (line {reader.line_num}): {many} fields than the "
                        f"{len(columns)} that the first line names: quote fields with a comma or a line break."
                    ))
                else:
                    rows.append(row)
        except csv.Error as error:
            raise TaskError(f"{name}, record {len(rows) + 1}: {error}: does a quote stay open?") from error
        except UnicodeDecodeError as error:
            raise TaskError(f"{name} is not UTF-8 text ({error.reason}): save it as UTF-8.") from error
    return Rows(rows, name)


def _read_table(file: Path, name: str) -> Source:
    return open_table(file, name)


READERS: dict[str, Callable[[Path, str], Source]] = {
    ".jsonl": JsonLines, ".ndjson": JsonLines, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
    ".parquet": _read_table, ".arrow": _read_table,
}
