"""`split@path` becomes a source: records by index, read by what the file is called.

    data.jsonl .ndjson    by offset                         data.csv .tsv            into memory, every field a text
    data.json             a list, or lines after all        data.parquet .arrow      mapped, by the `datasets` library
    folder/               of `save_to_disk`, or of files    owner/name               a data set of the hub
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from envs.data.lines import JsonLines
from envs.data.shapes import MISSING
from streamrl.errors import TaskError

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
        """One field of every record in order; MISSING where there is none, an error where there is no record."""
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
        from envs.data.tables import open_folder

        return open_folder(path, split or DEFAULT_SPLIT, setting)
    if not file.is_file():
        raise TaskError(f"{setting}: there is no such file (looked at {file.resolve()}).")
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
    from envs.data.tables import open_table

    return open_table(file, name)


READERS: dict[str, Callable[[Path, str], Source]] = {
    ".jsonl": JsonLines, ".ndjson": JsonLines, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
    ".parquet": _read_table, ".arrow": _read_table,
}
