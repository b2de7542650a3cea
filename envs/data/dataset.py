"""The records of a run: `open_dataset` reads what `data.*` names and tells training from held-out records.

Without a file of its own the test split is made from the training files: the records whose prompts have the smallest
digests. So the same prompt is never on both sides, the choice does not depend on the seed or on the order of the file,
and records added later move few of those that are there.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import xxhash

from envs.data.shapes import MISSING, RecordShape, with_input
from envs.data.sources import Source, open_source
from streamrl.config.schema import DataConfig, OnBadRecord
from streamrl.errors import TaskError
from streamrl.messages.actors import MAX_RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Records:
    """Some of the records of a source."""

    source: Source
    shape: RecordShape
    indices: np.ndarray  # [N] int64, into the source

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A copy of the record. Raises TaskError naming file, record and field if it cannot be played."""
        at = int(self.indices[index])
        record = self.source.row(at)
        try:
            self.shape.check(record)
        except TaskError as error:
            raise TaskError(f"{self.source.where(at)}: {error}.") from error
        return record


@dataclass(frozen=True, slots=True)
class Mixture:
    """Parts one after the other; a part whose weight asks for more than it has is repeated within a pass.

    What is left of a repetition is taken evenly from all of the part, which may be in an order that matters.

    Args:
        lengths: places of each part in one pass, at least its number of records.
    """

    parts: tuple[Records, ...]
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A copy of the record at this place: a pure function of the place. Raises as `Records`."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        ends = list(accumulate(self.lengths))
        number = bisect_right(ends, index)
        part, place = self.parts[number], index - ends[number] + self.lengths[number]
        repeats, rest = divmod(self.lengths[number], len(part))
        if place < repeats * len(part):
            return part[place % len(part)]
        return part[(place - repeats * len(part)) * len(part) // rest]


def mixed(parts: Sequence[Records], weights: Sequence[float] | None) -> Mixture:
    """The parts, each with a share of the places in proportion to its positive weight; None: every record once.

    A pass is as short as it can be while every record comes at least once.
    """
    if weights is not None:  # a part may be empty: all of it is held out
        weights = [weight for part, weight in zip(parts, weights, strict=True) if len(part)]
    parts = [part for part in parts if len(part)]
    if weights is None:
        return Mixture(tuple(parts), tuple(len(part) for part in parts))
    scale = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
    lengths = tuple(max(len(part), round(weight * scale)) for part, weight in zip(parts, weights, strict=True))
    return Mixture(tuple(parts), lengths)


log = logging.getLogger("streamrl.data")

DEFAULT_RATIO, MIN_HELD_OUT, MAX_SHARE = 0.03, 20, 0.2
"""Held out by default: this share, or this many records if that is more, but never more than the last share."""
NUM_CHECKED = 2000
"""Records of a file that are checked in every detail when it is opened; the others when they are drawn."""
NUM_NAMED = 3
"""Bad records that are named when they are passed over; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Both splits of a run's records."""

    train: Mixture
    test: Mixture
    description: str

    def __str__(self) -> str:
        return self.description


@dataclass(frozen=True, slots=True)
class _File:
    """One opened file: its good records and the digests of their prompts."""

    source: Source
    indices: np.ndarray  # [N] int64, into the source
    digests: np.ndarray  # [N] uint64


def open_dataset(settings: DataConfig, shape: RecordShape | None = None) -> Dataset:
    """The records that the settings name.

    Args:
        shape: what reads and checks them; None takes prompts and answers, by `data.prompt_key` and `data.answer_key`.

    Raises:
        TaskError: a file that cannot be read, a record without a prompt (unless data.on_bad_record=skip), nothing left
            to hold out.
    """
    shape = shape or RecordShape(settings.prompt_key, settings.answer_key)
    files = _open_all(settings.path, shape, settings, "data.path")
    if settings.num_samples is not None:
        files = [_File(f.source, f.indices[: settings.num_samples], f.digests[: settings.num_samples]) for f in files]
    digests = np.concatenate([file.digests for file in files])
    if settings.test_path is not None:
        is_test = np.zeros(len(digests), bool)
        held_out = _open_all(settings.test_path, shape, settings, "data.test_path")
        test = mixed([Records(file.source, shape, file.indices) for file in held_out], None)
        num_in_both = int(np.isin(digests, np.concatenate([file.digests for file in held_out])).sum())
        said = f"{len(test)} held out" + (f", {num_in_both} training prompts are among them" if num_in_both else "")
    else:
        is_test, test, num_in_both = _held_out(digests, settings.test_ratio, settings.path), None, 0
    masks = np.split(is_test, np.cumsum([len(file.digests) for file in files])[:-1])
    train = mixed(
        [Records(file.source, shape, file.indices[~mask]) for file, mask in zip(files, masks, strict=True)],
        settings.weights,
    )
    if test is None:
        parts = [Records(f.source, shape, f.indices[mask]) for f, mask in zip(files, masks, strict=True) if mask.any()]
        test = mixed(parts, None) if parts else train
        said = f"{len(test)} held out" if parts else "evaluated on training prompts"
    names = ", ".join(file.source.name for file in files)
    return Dataset(train, test, f"{names}: {len(train)} records to train on, {said}")


def _open_all(paths: str | Sequence[str], shape: RecordShape, settings: DataConfig, setting: str) -> list[_File]:
    return [_open(path, shape, settings.on_bad_record, setting) for path in paths_of(paths)]


def paths_of(paths: str | Sequence[str]) -> list[str]:
    """`data.path` as a list: it may be one path or several."""
    return [paths] if isinstance(paths, str) else list(paths)


def _open(path: str, shape: RecordShape, on_bad: OnBadRecord, setting: str) -> _File:
    source = open_source(path, setting=setting)
    digests, good, errors = np.zeros(len(source), np.uint64), np.ones(len(source), bool), []
    for index, prompt in enumerate(_prompts(source, shape)):
        if not isinstance(prompt, TaskError):
            digests[index] = xxhash.xxh3_64_intdigest(msgspec.json.encode(prompt))
            continue
        if on_bad is OnBadRecord.error:
            raise TaskError(f"{prompt} Fix this record, or set data.on_bad_record=skip.")
        good[index] = False
        errors.append(str(prompt))
    if errors:
        log.warning("%s: %d of %d records were skipped: %s%s", source.name, len(errors), len(source),
                    " | ".join(errors[:NUM_NAMED]), " | ..." if len(errors) > NUM_NAMED else "")
    if not good.any():
        raise TaskError(f"{setting}={path}: no record can be used: name another file. The first: {errors[0]}")
    return _File(source, np.flatnonzero(good), digests[good])


def _prompts(source: Source, shape: RecordShape) -> Iterator[Any]:
    """The prompt of every record in order, or what is wrong with the record."""
    key = _prompt_key(source, shape)
    values: Iterator[Any] = source.field(key)
    if key == "instruction" and shape.prompt_key is None:
        values = map(with_input, values, source.field("input"))
    for index, value in enumerate(values):
        if isinstance(value, TaskError):
            yield value
        elif index < NUM_CHECKED or value in (MISSING, None, "") or _is_odd(value):
            yield _checked_prompt(source, shape, index)
        else:
            yield value


def _is_odd(prompt: Any) -> bool:
    """Tell whether an actor cannot be sent a prompt, or it alone may be too much: a character is up to 12 bytes."""
    try:
        encoded = msgspec.json.encode(prompt)
    except (UnicodeEncodeError, RecursionError):
        return True
    return len(prompt if isinstance(prompt, str) else encoded) > MAX_RECORD_BYTES // 12


def _prompt_key(source: Source, shape: RecordShape) -> str:
    """The field of the first good record's prompt; the others are looked at one by one if theirs is another."""
    for index in range(min(NUM_CHECKED, len(source))):
        try:
            return shape.prompt_field(source.row(index))
        except TaskError:
            continue
    return shape.prompt_key or ""


def _checked_prompt(source: Source, shape: RecordShape, index: int) -> Any:
    try:
        record = source.row(index)
    except TaskError as error:
        return error
    try:
        shape.check(record)
        return shape.prompt(record)
    except TaskError as error:
        return TaskError(f"{source.where(index)}: {error}.")


def _held_out(digests: np.ndarray, ratio: float | None, path: Any) -> np.ndarray:
    """Mark the records [N] that are held out: those with the smallest digests, and all others with the same prompts."""
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
