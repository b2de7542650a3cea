"""The inputs of a call from Python: a reward and records, written as files that every process of the run reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from streamrl.api.overrides import words_of
from streamrl.api.reward_source import module_of
from streamrl.config.overrides import literal
from streamrl.errors import ConfigError

FOLDER = "inputs"
"""Of the run directory: a resumed run reads them again."""
SPLITS = {"train": "data.path", "test": "data.test_path"}
Reward = Callable[..., Any] | str | PathLike[str] | Mapping[str, float]
Records = Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]] | str | PathLike[str]


class Inputs:
    """The files, as texts until there is a folder for them, and the settings that name what is no file.

    Args:
        reward: a function; the path of a Python file; the name of a reward, or a mapping of names to weights.
        data: records, or a mapping with records under `train` and `test`; a path or the name of a data set.
    Raises:
        ConfigError: a function that cannot be written into a file, or a record that is not JSON.
    """

    def __init__(self, reward: Reward | None, data: Records | None) -> None:
        self._words: list[str] = []
        self._files: dict[str, tuple[str, str]] = {}
        if reward is not None:
            self._add_reward(reward)
        if data is not None:
            self._add_data(data)

    def write(self, folder: Path) -> list[str]:
        """Write the files into the folder; returns the settings."""
        if self._files:
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in self._files.values():
            (folder / name).write_text(text, encoding="utf-8")
        return [*self._words, *(f"{key}={_path(folder / name)}" for key, (name, _) in self._files.items())]

    def _add_reward(self, reward: Reward) -> None:
        if isinstance(reward, str | PathLike):
            text = fspath(reward)
            self._words += words_of({"env.path" if text.endswith(".py") else "reward.type": text})
        elif isinstance(reward, Mapping):
            for name, weight in reward.items():
                if not isinstance(weight, Real):
                    raise ConfigError(f"reward[{name!r}] is {weight!r:.60}: a mapping has the weight of each reward by "
                                      "its name, a number; give functions as one that returns a mapping of parts.")
            self._words.append(f"reward.weights={literal({name: float(one) for name, one in reward.items()})}")
        elif isinstance(reward, list | tuple):
            raise ConfigError(
                "reward is a list: give one function that returns a mapping such as {\"exact\": 1.0, \"format\": 0.5}; "
                "the sum is the reward, and each part is logged under its name."
            )
        else:
            self._files["env.path"] = ("reward.py", module_of(reward))

    def _add_data(self, data: Records) -> None:
        if isinstance(data, str | PathLike):
            self._words += words_of({"data.path": data})
            return
        parts = data if isinstance(data, Mapping) else {"train": data}
        if "train" not in parts or parts.keys() - SPLITS.keys():
            raise ConfigError(f"data is a mapping with {', '.join(map(repr, parts))}: give records under 'train', and "
                              "under 'test' if some are held out, or the list of records itself.")
        for split, records in parts.items():
            where = "data" if records is data else f"data[{split!r}]"
            self._files[SPLITS[split]] = (f"{split}.jsonl", json_lines(records, where))


def _path(path: Path) -> str:
    """A path as a person would type it, if that can be read."""
    return str(path) if re.fullmatch(r"[\w./-]*/[\w./-]+", str(path)) else literal(str(path))


def json_lines(records: Any, where: str) -> str:
    """One line of JSON for each record. Raises ConfigError for the first that is not JSON, with its field."""
    if hasattr(records, "to_dict") and hasattr(records, "itertuples"):  # a DataFrame iterates over names of columns
        records = records.to_dict("records")
    if not isinstance(records, Iterable):
        raise ConfigError(f"{where} is a {type(records).__name__}: give a list of dictionaries.")
    lines = [_line(record, f"record {number} of {where}") for number, record in enumerate(records, start=1)]
    if not lines:
        raise ConfigError(f"{where} holds no records: give a list of dictionaries.")
    return "".join(lines)


def _line(record: Any, where: str) -> str:
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where} is a {type(record).__name__} ({record!r:.60}): it must be a dictionary.")
    for field, value in record.items():
        if not isinstance(field, str):
            raise ConfigError(f"{where}: the name of its field {field!r:.60} must be a text.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where}: its field {field!r} is {value!r:.60}, which JSON cannot hold ({error}): make it a text, a "
                "number, True, False, None, or a list or dictionary of these."
            ) from error
    return json.dumps(dict(record)) + "\n"
