"""Refusals of a `key=value` word: what it must be, what was got, and an example. hydra's own name no remedy."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any, NoReturn

from streamrl.config.aliases import HYDRA, HYDRA_SWEEPS
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean

Setting = tuple[str, str, Any, str]
"""(dotted name, type, default, sentence), as `streamrl.config.load.settings` gives them."""

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
_EXAMPLES = {"int": "10", "float": "0.5", "bool": "true", "str": "text"}

_NOISE = ("object_type", "reference_type", "full_key:", "Config search path", "provider=", "See https")


def one_line(error: Exception) -> tuple[str, list[str]]:
    """The message of hydra or omegaconf in one line, and the keys that it names."""
    text = f"{error}\n{error.__cause__}" if error.__cause__ is not None else str(error)
    lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    names = [name for line in lines if line.startswith("full_key:") if (name := line.removeprefix("full_key:").strip())]
    return " ".join(line for line in lines if not line.startswith(_NOISE)), names


def refuse_type(setting: Setting, value: str) -> NoReturn:
    """A value of another type than the setting's."""
    name, kind, default, sentence = setting
    if kind.startswith("list"):
        raise ConfigError(f"{name}={value} must be a list, e.g. {name}=[a,b]. {sentence}")
    if kind.startswith("dict"):
        raise ConfigError(f"{name}={value} must be a mapping, e.g. {name}.key=value. {sentence}")
    parts = kind.split("|")
    if not any(part in _WORDS for part in parts):
        near = did_you_mean(value, parts)
        raise ConfigError(f"{name}={value} is unknown.{near} Choose one of {', '.join(parts)}. {sentence}")
    known = " or ".join(_WORDS.get(part, part) for part in parts)
    example = str(default).lower() if default is not None else _EXAMPLES[parts[0]]
    raise ConfigError(f"{name}={value} must be {known}, e.g. {name}={example}. {sentence}")


def refuse_unreadable(name: str, value: str) -> NoReturn:
    """A value with brackets, quotes or an equals sign that do not fit together."""
    raise ConfigError(
        f"`{name}={value}` cannot be read: a list is {name}=[a,b], a mapping {name}={{key:value}}; put quotes around a "
        f"text with brackets, commas, quotes or =, inside those of the shell: '{name}=\"a,b\"'."
    )


def refuse_several(name: str, value: str) -> NoReturn:
    """Values with commas between them, without -m."""
    raise ConfigError(
        f"{name}={value} names several values. One run for each: streamrl launch -m {name}={value} ...; write a list "
        f"as {name}=[{value}], a text with a comma as '{name}=\"{value}\"'."
    )


def refuse_removal(name: str) -> NoReturn:
    """A word with ~ in front."""
    raise ConfigError(f"~{name} removes nothing: every setting has a value; write {name}=VALUE, or leave the word out.")


def refuse_file(group: str, name: str, names: Sequence[str]) -> NoReturn:
    """A file of configs/<group>/ that is not there."""
    raise ConfigError(
        f"{group}={name} is unknown.{did_you_mean(name, names)} There are {', '.join(sorted(names))}; a settings file "
        "of your own goes without a key: streamrl launch my.yaml."
    )


def refuse_option(word: str, following: str, name: str | None) -> NoReturn:
    """A word with dashes in front; `following` may be its value, `name` is the setting that it may mean."""
    option, equals, value = word.partition("=")
    if not equals and "=" not in following and not following.startswith("--"):
        value = following
    typed = f"{option}{equals or (value and ' ')}{value}"
    meant = f"write {name}={value or 'VALUE'}" if name else "e.g. trainer.num_steps=200"
    raise ConfigError(f"`{typed}` is not an option here: settings are key=value, {meant}")


def refuse_hydra(key: str) -> NoReturn:
    """An option of hydra's own, which would change nothing."""
    if key in HYDRA_SWEEPS:
        raise ConfigError(f"`{key}` is of a sweep: streamrl launch -m ..., or there as {HYDRA_SWEEPS[key]}=VALUE.")
    meant = next((ours for name, ours in HYDRA.items() if f"{key}/".startswith((f"{name}/", f"{name}."))), None)
    meant = meant or "a setting of `streamrl settings run` or `streamrl settings sweep`"
    raise ConfigError(f"`{key}` is not used here, where hydra only reads the words: take {meant}.")


def refuse_word(word: str, experiments: Sequence[str]) -> NoReturn:
    """A word without `=`."""
    meant = f" Did you mean experiment={word}?" if word in experiments else ""
    meant = f" Did you mean env.path={word}?" if word.endswith(".py") else meant
    raise ConfigError(f"`{word}` is not a setting: write key=value, e.g. trainer.num_steps=200.{meant}")


def type_name(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "|".join(member.name for member in hint)
    if isinstance(hint, types.UnionType):
        return "|".join("null" if part is types.NoneType else part.__name__ for part in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)


@cache
def field_sentences(cls: type) -> dict[str, str]:
    """The sentence under each field of a dataclass, read from its source (Python keeps none at run time)."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            found[node.target.id] = " ".join(str(following.value.value).split())
    return found
