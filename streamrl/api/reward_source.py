"""A Python function as the text of a module of its own, for `env.path`: read from its source, never pickled.

The module holds the function and what it uses by name: imports, plain constants, and the helper functions that were
defined beside it. A name that stands for anything else cannot be written down, and is refused with its reason.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from streamrl.errors import ConfigError

REMEDY = 'put the reward into a file and name it: reward="my_reward.py"'
REWARD_NAMES = ("reward_fn", "reward", "compute_score")
"""Under these a file's reward is found (docs/rewards.md)."""
HEADER = "from __future__ import annotations"


def module_of(function: Callable[..., Any]) -> str:
    """The text of a module that defines the function as a reward. Raises ConfigError: it cannot be written."""
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(function, FunctionType) or name == "<lambda>":
        raise ConfigError(f"reward={function!r:.80} is {_what(function)}: define a function with `def`, or {REMEDY}.")
    module = _Module(name)
    module.add_function(name, function)
    lines = [HEADER, *_sorted(module.imports), "", *module.constants, "", *module.functions]
    if name not in REWARD_NAMES:
        lines.append(f"reward_fn = {name}")
    return "\n".join(lines).rstrip() + "\n"


class _Module:
    """The module written so far: name -> value, and the texts in the order in which they must stand."""

    def __init__(self, reward: str) -> None:
        self._reward, self._known = reward, dict[str, Any]()
        self.imports, self.constants, self.functions = list[str](), list[str](), list[str]()

    def add_function(self, name: str, function: FunctionType) -> None:
        """The function, after everything that it uses."""
        self._known[name] = function
        text = _source(function, self._reward)
        written = inspect.unwrap(function)  # what its decorators were given
        values = {**vars(builtins), **written.__globals__, **_closure(written)}
        try:
            names = _used_names(text)
        except SyntaxError as error:  # of the function without what stands around it, as `nonlocal`
            raise ConfigError(
                f"reward={self._reward}: {function.__name__} cannot stand alone ({error.msg}): {REMEDY}."
            ) from error
        for used in names:
            if used == name and name == function.__name__:
                continue
            if used not in values:
                self._refuse(used, function, "it is not defined")
            if used not in vars(builtins) or values[used] is not vars(builtins)[used]:
                self._add(used, values[used], function)
            for inner in _reached(values[used], used, text):
                self._import(f"import {inner}", inner)
        self.functions += [text, ""] if name == function.__name__ else [text, f"{name} = {function.__name__}", ""]

    def _add(self, name: str, value: Any, user: FunctionType) -> None:
        if name in self._known:
            if self._known[name] is not value:
                self._refuse(name, user, "two functions use it for different things")
            return
        if name == REWARD_NAMES[0] or name in REWARD_NAMES and callable(value):
            self._refuse(name, user, "in a file the reward itself has this name")
        self._known[name] = value
        if isinstance(value, ModuleType):
            if value.__name__ == "__main__" or getattr(value, "__spec__", None) is None:
                self._refuse(name, user, "it is a module that no other process can import")
            self._import(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""), value.__name__)
        elif (home := _home(value)) is not None:
            module, attribute = home
            renamed = f" as {name}" if name != attribute else ""
            self._import(f"from {module} import {attribute}{renamed}", module)
        elif isinstance(value, FunctionType) and value.__name__ != "<lambda>":
            self.add_function(name, value)
        elif isinstance(value, re.Pattern):
            self._import("import re", "re")
            self.constants.append(f"{name} = re.compile({value.pattern!r}, {int(value.flags)})")
        elif _is_plain(value):
            self.constants.append(f"{name} = {value!r}")
        elif user.__module__ != "__main__" and getattr(sys.modules.get(user.__module__), name, None) is value:
            self._import(f"from {user.__module__} import {name}", user.__module__)
        else:
            self._refuse(name, user, f"{_what(value)} cannot be written into a file")

    def _import(self, line: str, module: str) -> None:
        """An import; of a module of the user's own with the folder in which it was found."""
        top = module.partition(".")[0]
        file = getattr(sys.modules.get(top), "__file__", None) or ""
        known = top in sys.stdlib_module_names or top == "streamrl"
        if file and not known and not {"site-packages", "dist-packages"} & {*Path(file).parts}:
            folder = Path(file).resolve().parent
            folder = folder.parent if Path(file).name == "__init__.py" else folder
            line = f"import sys; sys.path.append({str(folder)!r})\n{line}"
        if line not in self.imports:
            self.imports.append(line)

    def _refuse(self, name: str, user: FunctionType, why: str) -> None:
        what = f"its function {user.__name__}" if user.__name__ != self._reward else "it"
        raise ConfigError(f"reward={self._reward}: {what} uses `{name}`, and {why}: make it inside the function, or "
                          f"{REMEDY}.")


def _source(function: FunctionType, reward: str) -> str:
    """The text of a function without its indentation. Raises ConfigError: it has none, or is not what was called."""
    try:
        text = textwrap.dedent(inspect.getsource(function)).rstrip()
        (definition,) = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"reward={reward}: the source of {function.__name__} cannot be read (it was typed at a prompt, made by "
            f"exec, or stands between other code): {REMEDY}."
        ) from error
    if getattr(definition, "decorator_list", ()) and not hasattr(function, "__wrapped__"):
        raise ConfigError(
            f"reward={reward}: {definition.name} has a decorator without functools.wraps, so its text does not "
            f"say what is called: {REMEDY}."
        )
    return text


def _used_names(text: str) -> list[str]:
    """Names that the text of a function takes from around it, defaults and decorators included, without annotations."""
    pending = [symtable.symtable(f"{HEADER}\n{text}", "<reward>", "exec")]
    seen: set[str] = set()
    while pending:
        table = pending.pop()
        pending += table.get_children()
        is_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or is_top) and not (is_top and symbol.is_imported()):
                seen.add(symbol.get_name())
    return sorted(seen)


def _reached(value: Any, name: str, text: str) -> Iterator[str]:
    """Modules inside this one that a text reaches through its name: `import xml` alone lacks xml.etree.ElementTree."""
    for node in ast.walk(ast.parse(text)) if isinstance(value, ModuleType) else ():
        names, inner = list[str](), value
        while isinstance(node, ast.Attribute):
            names, node = [node.attr, *names], node.value
        for attribute in names if isinstance(node, ast.Name) and node.id == name else ():
            inner, outer = getattr(inner, attribute, None), inner.__name__
            if not isinstance(inner, ModuleType) or inner.__name__ != f"{outer}.{attribute}":
                break
            yield inner.__name__


def _closure(function: FunctionType) -> dict[str, Any]:
    """Values of the function around it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def _home(value: Any) -> tuple[str, str] | None:
    """(module, name) under which another process can import this very function or class."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module in ("__main__", "builtins") or "." in name or not isinstance(name, str):
        return None
    if not isinstance(value, type) and not callable(value):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return (module, name) if found is value else None


def _is_plain(value: Any) -> bool:
    """Whether its text means the same value: None, numbers, texts, and collections of these."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _what(value: Any) -> str:
    if isinstance(value, FunctionType):
        return "a lambda"
    if inspect.ismethod(value):
        return f"a method of a {type(value.__self__).__name__}"
    if inspect.isbuiltin(value):
        return "a function that is built into Python"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _sorted(lines: list[str]) -> list[str]:
    return sorted(lines, key=lambda line: (line.startswith("import sys; "), line))
