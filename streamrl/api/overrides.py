"""Settings as Python writes them, `trainer__num_steps=20`, become words of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from os import PathLike, fspath
from typing import Any

from streamrl.config.catalog import is_setting, nearest_setting
from streamrl.config.overrides import GROUPS, literal
from streamrl.errors import ConfigError

KEY = re.compile(r"[A-Za-z_][\w-]*")


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """`key=value` words of keyword arguments; two underscores stand for a dot.

    Raises ConfigError: a key that is no setting, with the nearest one, or a value that no setting can have.
    """
    words = []
    for given, value in settings.items():
        key = given.replace("__", ".")
        if key not in GROUPS and not is_setting(key):
            hint = nearest_setting(key)
            meant = re.search(r"did you mean `([\w.]+)`", hint)
            hint = f"did you mean {meant[1].replace('.', '__')}=...?" if meant else hint
            raise ConfigError(f"Unknown key `{given}`: {hint} (Two underscores stand for the dot in a setting's name.)")
        words.append(f"{key}={literal(_plain(value, given))}")
    return words


def _plain(value: Any, name: str) -> Any:
    """The value of texts, numbers, lists and mappings alone. Raises ConfigError for one that no setting can have."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PathLike):
        value = fspath(value)
    if isinstance(value, str):
        if "${" in value or value == "???":
            raise ConfigError(f"{name}={value!r:.80}: a setting cannot hold ${{, and is never ??? alone: leave it "
                              "out of the text.")
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or not KEY.fullmatch(key)]
        if wrong:
            raise ConfigError(f"{name}: the key {wrong[0]!r} of a mapping must be a word of letters, digits, _ and -.")
        return {key: _plain(one, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one, name) for one in value]
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
        return value.item()
    raise ConfigError(
        f"{name}={value!r:.80} is a {type(value).__name__}: a setting must be a text, a number, True, False, None, or "
        "a list or mapping of these."
    )
