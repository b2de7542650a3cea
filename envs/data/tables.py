"""Parquet, Arrow, folders and data sets of the hub, through the `datasets` library: memory-mapped, whatever their size.

The library takes seconds to import, so only opening such a file does.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from envs.data.hub import from_the_cache, hub_answers
from envs.data.shapes import MISSING
from streamrl.errors import DataChangedError, TaskError, install_extra
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
