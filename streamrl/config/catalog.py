"""Every setting by its dotted name: its type, default and sentence, read from the dataclasses of the schema."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

from streamrl.config.aliases import suggestion
from streamrl.config.schema import Config

PATHS = ("data.path", "data.test_path")
"""Settings of several types, of which a scalar is a path."""


def settings(section: Any = None, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """(dotted name, type, default, sentence) of every setting of a section, by default of all, in schema order."""
    section = Config() if section is None else section
    sentences, hints = _sentences(type(section)), typing.get_type_hints(type(section))
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{item.name}.")
        else:
            default = value.name if isinstance(value, Enum) else value
            yield f"{prefix}{item.name}", _type_name(hints[item.name]), default, sentences.get(item.name, "")


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "|".join(member.name for member in hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return "|".join("null" if part is types.NoneType else _type_name(part) for part in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)


@cache
def _sentences(cls: type) -> Mapping[str, str]:
    """The sentence under each field of a dataclass, read from its source (Python keeps none at run time)."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):  # a section may extend another
        body = ast.parse(inspect.getsource(part)).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, following in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
                found[node.target.id] = " ".join(str(following.value.value).split())
    return found


@cache
def kinds() -> Mapping[str, str]:
    """The type of every setting."""
    return {name: kind for name, kind, _, _ in settings()}


@cache
def setting_names() -> frozenset[str]:
    """Dotted names of every setting and section."""
    parts = [name.split(".") for name in kinds()]
    return frozenset(".".join(one[:end]) for one in parts for end in range(1, len(one) + 1))


@cache
def texts() -> frozenset[str]:
    """Names of the settings that are texts, or lists of them: what is typed there is no number and no truth value."""
    return frozenset(name for name, kind in kinds().items() if kind.startswith(("str", "list[str]"))) | {*PATHS}


@cache
def open_mappings() -> tuple[str, ...]:
    """Prefixes of settings that take any key (`env.options.`); their reader checks the keys."""
    return tuple(f"{name}." for name, _, default, _ in settings() if isinstance(default, dict))


def is_setting(name: str) -> bool:
    """Whether there is a setting or a section of this name."""
    return name in setting_names() or name.startswith(open_mappings())


def nearest_setting(key: str) -> str:
    """The setting that was probably meant, as the end of a sentence."""
    return suggestion(key, setting_names())
