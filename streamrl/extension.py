"""A name in the settings becomes an object: an entry of one of our tables, or a user's own `package.module:attribute`.

Every table of the project is read through `resolve`, so that a surrogate, an estimator, a correction, a transport, an
engine, a tracker or an optimizer of one's own needs no change to our files.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from streamrl.errors import ConfigError

T = TypeVar("T")


def resolve(name: str, table: Mapping[str, T], *, setting: str) -> T:
    """The entry of `table` called `name`, or the attribute that `package.module:attribute` names.

    Args:
        setting: the key that holds the name, for the message (`loss.surrogate`).
    Raises:
        ConfigError: no such entry (with the nearest names), module or attribute.
    """
    if name in table:
        return table[name]
    if ":" in name:
        return import_attribute(name, setting=setting)
    raise ConfigError(
        f"{setting}={name} is unknown.{did_you_mean(name, table)} Choose from {', '.join(sorted(table))}, "
        "or name your own as package.module:attribute."
    )


def resolve_function(name: str, table: Mapping[str, T], *, setting: str) -> T:
    """`resolve` for a table of functions or classes. Raises ConfigError also for what cannot be called, or is async."""
    found = resolve(name, table, setting=setting)
    if name not in table and not callable(found):
        raise ConfigError(f"{setting}={name} is {found!r:.60}: it must be a function.")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{setting}={name} is an async function, and nothing awaits it: write `def`.")
    return found


def import_attribute(name: str, *, setting: str) -> Any:
    """The object that `package.module:attribute` names. Raises ConfigError naming what is missing, and where."""
    module_name, _, attribute = name.partition(":")
    if not attribute or module_name.endswith(".py"):
        module, wanted = module_name.removesuffix(".py").replace("/", "."), attribute or "NAME"
        raise ConfigError(f"{setting}={name} must be module:attribute: write {setting}={module}:{wanted}")
    if os.getcwd() not in sys.path:  # our programs run without it (python -P); last, so that it shadows nothing
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{setting}={name}: cannot import {error.name!r}. "
            "Install the package, or start from the folder that holds it."
        ) from error
    except (Exception, SystemExit) as error:  # of the user's own module, which may be a script
        raise ConfigError(
            f"{setting}={name}: {module_name} failed while it was imported, see its code: {error!r}{script_hint(error)}"
        ) from error
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [key for key in vars(module) if not key.startswith("_")])
        raise ConfigError(f"{setting}={name}: module {module_name} has no {attribute!r}.{hint}")
    return getattr(module, attribute)


def script_hint(error: BaseException) -> str:
    """The remedy, if a module ended the process while it was imported."""
    return '. Put what it does as a script under `if __name__ == "__main__":`.' if isinstance(error, SystemExit) else ""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """ " Did you mean a or b?" for the nearest of the candidates, by name or by a word of it; empty if none is near."""
    candidates = list(candidates)
    near = difflib.get_close_matches(name, candidates, n=3)
    if not near:
        words = {word: one for one in reversed(candidates) for word in re.split(r"[^0-9A-Za-z]+", one)}
        near = [words[word] for word in difflib.get_close_matches(name, words, n=1, cutoff=0.75)]
    return f" Did you mean {' or '.join(near)}?" if near else ""
