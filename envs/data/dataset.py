"""The records of a run: `open_dataset` reads what `data.*` names and tells training from held-out records.

Without a file of its own the test split is made from the training file: the records whose prompts have the smallest
digests. So the same prompt is never on both sides, the choice does not depend on the seed or on the order of the file,
and records added later move few of those that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash

from envs.data.shapes import MISSING, RecordShape
from envs.data.sources import Source, open_source
from streamrl.config.schema import DataConfig
from streamrl.errors import TaskError

DEFAULT_RATIO, MIN_HELD_OUT, MAX_SHARE = 0.03, 20, 0.2
"""Held out by default: this share, or this many records if that is more, but never more than the last share."""
NUM_CHECKED = 2000
"""Records of a file that are checked in every detail when it is opened; the others when they are drawn."""


@dataclass(frozen=True, slots=True)
class Records:
    """Some of the records of a source."""

    source: Source
    shape: RecordShape
    indices: np.ndarray  # [N] into the source

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A record of its own at `index`. Raises TaskError naming file, record and field if it cannot be played."""
        at = int(self.indices[index])
        record = self.source.row(at)
        try:
            self.shape.check(record)
        except TaskError as error:
            raise TaskError(f"{self.source.where(at)}: {error}") from error
        return record


@dataclass(frozen=True, slots=True)
class Dataset:
    """Both splits of a run's records."""

    train: Records
    test: Records
    name: str

    def __str__(self) -> str:
        held_out = "evaluated on training prompts" if self.test is self.train else f"{len(self.test)} held out"
        return f"{self.name}: {len(self.train)} records to train on, {held_out}"


def open_dataset(settings: DataConfig) -> Dataset:
    """The records that the settings name.

    Raises:
        TaskError: a file that cannot be read, a record without a prompt, or a held-out part that would be empty.
    """
    assert settings.path is not None, "data.path is not set"
    shape = RecordShape(settings.prompt_key, settings.answer_key)
    source = open_source(settings.path, setting="data.path")
    digests = _prompt_digests(source, shape)
    everything = np.arange(len(source))
    if settings.test_path is not None:
        held_out = open_source(settings.test_path, setting="data.test_path")
        _prompt_digests(held_out, shape)
        train, test = Records(source, shape, everything), Records(held_out, shape, np.arange(len(held_out)))
    else:
        is_test = _held_out(digests, settings.test_ratio, settings.path)
        train = Records(source, shape, everything[~is_test])
        test = Records(source, shape, everything[is_test]) if is_test.any() else train
    for records in (train, test):
        for index in range(min(NUM_CHECKED, len(records))):
            records[index]
    return Dataset(train, test, source.name)


def _held_out(digests: np.ndarray, ratio: float | None, path: str) -> np.ndarray:
    """Which records [N] are held out: those with the smallest digests, and all others with the same prompts."""
    num = len(digests)
    if ratio == 0:
        return np.zeros(num, bool)
    wanted = math.ceil(num * ratio) if ratio is not None else max(
        math.ceil(num * DEFAULT_RATIO), min(MIN_HELD_OUT, int(num * MAX_SHARE))
    )
    distinct = np.unique(digests)
    if len(distinct) < 2:
        raise TaskError(
            f"data.path={path} holds one prompt only, so nothing can be held out: give data.test_path, or "
            "data.test_ratio=0 to evaluate on what is trained."
        )
    cutoff = np.partition(digests, wanted - 1)[wanted - 1]
    if cutoff == distinct[-1]:  # one prompt fills most of the file: keep something to train on
        cutoff = distinct[-2]
    return digests <= cutoff


def _prompt_digests(source: Source, shape: RecordShape) -> np.ndarray:
    """A digest [N] of every record's prompt. Raises TaskError for a record that is damaged or has no prompt."""
    try:
        key = shape.prompt_field(source.row(0))
    except TaskError as error:
        raise TaskError(f"{source.where(0)}: {error}") from error
    return np.fromiter((_digest(value) for value in _prompts(source, shape, key)), np.uint64, len(source))


def _prompts(source: Source, shape: RecordShape, key: str) -> Iterator[Any]:
    nested = "." in key  # such a field is read from the whole record
    values = (MISSING for _ in range(len(source))) if nested else source.field(key)
    for index, value in enumerate(values):
        if value is not MISSING and value is not None and value != "":
            yield value
            continue
        try:
            found = shape.prompt(source.row(index))
            if found is None or found == "":
                raise TaskError(f"field {key!r} is empty")
        except TaskError as error:
            where = source.where(index)
            raise TaskError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
        yield found


def _digest(prompt: Any) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(prompt))
