"""`key=value` words and settings files as (setting, value) pairs: the grammar of the command line.

The grammar is that of hydra's overrides, which sweeps use too. It cannot read every text, such as a path with ~ or
parentheses, and reads others as numbers: a setting that is a text gets the text that was typed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from streamrl.config.aliases import done_otherwise, nearest
from streamrl.config.catalog import is_setting, kinds, nearest_setting, open_mappings, setting_names, texts
from streamrl.config.composition import (
    SEARCH_PATH,
    check_choice,
    directories_of,
    group_files,
    hydra_words_in,
    is_choice,
    is_file,
)
from streamrl.config.hydra_words import own_words
from streamrl.config.hydra_words import refuse as refuse_hydra
from streamrl.errors import ConfigError
from streamrl.named_code import check_stored, is_of_a_run, is_own, refuse_references

GROUPS = ("algorithm", "experiment")
"""Folders under configs/: `experiment=quickstart` picks experiment/quickstart.yaml."""
REMOVED = object()
"""The value of a key of an open mapping that `~key` takes away."""
REMOVES_NOTHING = "~{0} removes nothing: every setting has a value; write {0}=VALUE, or leave the word out."
ALLOW = "actors.allow="
MAX_CHARS, MAX_VALUES = 1_000_000, 100_000
"""Of a settings file: an alias in YAML counts as what it stands for, so a few lines can mean billions of values."""
REPLACES: Mapping[str, tuple[str, ...]] = {
    "policy.model_path": ("policy.tiny.enabled",), "policy.tiny.enabled": ("policy.model_path",),
    "env.name": ("env.path", "env.options", "data.path", "data.test_path", "reward.type", "reward.weights"),
    "env.path": ("env.options", "reward.type", "reward.weights"),
    "env.options": ("env.options",), "reward.type": ("env.path", "reward.weights"),
    "reward.weights": ("env.path", "reward.type"), "data.path": ("data.test_path", "data.weights"),
}
"""A setting on the command line -> what it replaces in the file beside its own value there."""
_NAME, _ODD, _ESCAPED = re.compile(r"[^:=(){}\[\],\s\\'\"]+"), re.compile(r"([\\(){}\[\]:=, \t])"), r"\\\1"

# --- words ------------------------------------------------------------------------------------------------------------


def parse_overrides(words: Sequence[str]) -> list[tuple[str, Any]]:
    """(setting, value) of every word but Hydra's choices; a value is checked by `load`, which knows all of them.

    Raises ConfigError: a word that names no setting or holds none of its values, whatever its type.
    """
    check_names(words)
    directories, found = directories_of(words), list[tuple[str, Any]]()
    for word in words:
        if is_file(word) or word.startswith(SEARCH_PATH):
            continue
        key, _, text = word.lstrip("+~").partition("=")
        if word.startswith("~"):
            if is_choice(word, directories):
                continue
            if not key.startswith(open_mappings()):
                raise ConfigError(REMOVES_NOTHING.format(key))
            found.append((key, REMOVED))
            continue
        try:
            override = parse_word(quoted(f"{key}={text}"))
        except HydraException:  # a name that is no key, as one that begins with a digit
            refuse_unreadable(key, text)
        if (name := key_given_twice(text)) is not None:
            raise ConfigError(f"{key}={text} names {name} twice: give each its own name.")
        if override.is_sweep_override():
            raise ConfigError(
                f"{key}={text} names several values. One run for each: streamrl launch -m {key}={text} ...; write a "
                f"list as {key}=[{text}], a text with a comma as '{key}=\"{text}\"'."
            )
        if is_choice(word, directories):
            check_choice(key.partition("@")[0], override.value(), directories)
        else:
            found.append((key, override.value()))
    return found


def check_names(words: Sequence[str]) -> None:
    """Raise ConfigError, with the nearest valid key, for the first word that names no setting."""
    directories = directories_of(words)
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if is_choice(word, directories):
            continue
        if word.startswith("-"):
            _refuse_option(word, following)
        key, equals, _ = word.partition("=")
        key = key.lstrip("+~")
        if key.startswith(("hydra.", "hydra/")):
            refuse_hydra(key)
        if not equals and not word.startswith("~"):
            meant = f" Did you mean experiment={word}?" if word in group_files("experiment") else ""
            meant = f" Did you mean env.path={word}?" if word.endswith(".py") else meant
            raise ConfigError(f"`{word}` is not a setting: write key=value, e.g. trainer.num_steps=200.{meant}")
        check_name(key)


def _refuse_option(word: str, following: str) -> NoReturn:
    """A word with dashes in front; `following` may be its value."""
    option, equals, value = word.partition("=")
    if not equals and "=" not in following and not following.startswith("--"):
        value = following
    name = nearest(option.lstrip("-"), setting_names())
    otherwise = done_otherwise(option.lstrip("-"))
    meant = f"and {otherwise}" if otherwise else "e.g. trainer.num_steps=200"
    meant = f"write {name}={value or 'VALUE'}" if name else meant
    typed = f"{option}{equals or (value and ' ')}{value}"
    raise ConfigError(f"`{typed}` is not an option here: settings are key=value, {meant}")


def check_name(key: str) -> None:
    """Raise ConfigError, with the nearest valid key, for one that names no setting."""
    if not is_setting(key):
        raise ConfigError(f"Unknown key `{key}`: {nearest_setting(key)}")


def refuse_unreadable(name: str, value: str) -> NoReturn:
    """A value with brackets, quotes or an equals sign that do not fit together."""
    raise ConfigError(
        f"`{name}={value}` cannot be read: a list is {name}=[a,b], a mapping {name}={{key:value}}; put quotes around a "
        f"text with brackets, commas, quotes or =, inside those of the shell: '{name}=\"a,b\"'."
    )


@cache
def parse_word(word: str) -> Any:
    """A word as hydra's parser takes it."""
    return OverridesParser.create().parse_override(word)


def quoted(word: str) -> str:
    """A word with quotes around what its setting takes as text and the grammar would not."""
    key, _, value = word.partition("=")
    name = key.lstrip("+")
    kind = kinds().get(name, "str")  # of an open mapping, whatever it is
    try:
        found = parse_word(word)._value
    except HydraException:
        listed = value.startswith("[") and value.endswith("]") and not kind.startswith("str")
        closed = value[:1] not in ("{", "'", '"', "[") or listed
        if not closed or not kind.startswith(("str", "Any", "list")):
            refuse_unreadable(key, value)
        whole = literal(value) if kind.startswith("str") else ",".join(map(_element, parts_of(value)))
        readable = f"{key}=[{','.join(map(_element, parts_of(value[1:-1])))}]" if listed else f"{key}={whole}"
        try:
            parse_word(readable)
        except HydraException:
            refuse_unreadable(key, value)
        return readable
    if name not in texts() or (kind.startswith("list[str]") and not isinstance(found, list | ChoiceSweep)):
        return word
    if isinstance(found, ChoiceSweep):
        listed = re.fullmatch(r"choice\((.*)\)", value, re.DOTALL)
        start, inner, end = ("choice(", listed[1], ")") if listed else ("", value, "")
        return f"{key}={start}{_quote_each(inner, found.list)}{end}"
    return f"{key}={_quote_texts(value, found)}"


def _element(text: str) -> str:
    """One of the values between commas, in quotes if the grammar cannot read it."""
    try:
        parse_word(f"value=[{text}]")
    except HydraException:
        return literal(text)
    return text


def _quote_texts(text: str, value: Any) -> str:
    """A text in the grammar, with quotes around what is no text in `value`, as which it was read."""
    if isinstance(value, bool | int | float):
        return literal(text)
    if isinstance(value, list) and text.startswith("[") and text.endswith("]"):
        return f"[{_quote_each(text[1:-1], value)}]"
    return text


def _quote_each(text: str, values: Sequence[Any]) -> str:
    """The same for texts with commas between them."""
    parts = parts_of(text)
    return ",".join(map(_quote_texts, parts, values)) if len(parts) == len(values) else text


def parts_of(text: str) -> list[str]:
    """Split a text at the commas outside quotes and brackets; brackets of a name may be open."""
    parts = _SPLIT.findall(text)
    return [part.strip() for part in (parts if ",".join(parts) == text.rstrip(",") else text.split(","))]


_SPLIT = re.compile(r"""((?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\[[^\]]*\]|[^,\[\]'"])+)(?:,|$)""")
"""A piece between two commas that neither quotes nor brackets enclose."""


def key_given_twice(text: str) -> str | None:
    """The first key that stands twice in one mapping of a value, as `{a: 1, a: 2}`: the parser would drop one."""
    tokens = [one.strip() for one in _TOKENS.findall(text) if one.strip()]
    keys: list[set[str] | None] = [None]  # of the mappings around the place, the innermost last; None for a list
    for before, name, colon in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if before in ("{", "["):
            keys.append(set() if before == "{" else None)
        elif before in ("}", "]"):
            del keys[max(1, len(keys) - 1):]
        if (own := keys[-1]) is not None and before in ("{", ",") and colon == ":":
            if name in own:
                return name
            own.add(name)
    return None


_TOKENS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[{}\[\],:]|[^{}\[\],:'"]+""")
"""Quoted texts, the signs of lists and mappings, and what stands between them."""


def literal(value: Any) -> str:
    """A value in the grammar of overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_ODD.sub(_ESCAPED, str(key))}:{literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, str):
        return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + "\\'" * len(end[2]), value, flags=re.DOTALL) + "'"
    return str(value)


# --- files ------------------------------------------------------------------------------------------------------------


def read_files(
    words: Sequence[str], *, stored: Path | None = None, as_data: bool = False, multirun: bool = False
) -> list[str]:
    """The words, each settings file among them replaced by what it sets; one with a defaults list stays, for Hydra.

    Args:
        multirun: they are those of a sweep, which is what a section `hydra` of a file is about then.
        stored: the one among the files that a run directory holds, whatever else is there.
        as_data: its settings are only looked at, not used.
    Raises:
        ConfigError: a file that it cannot be, or one of a run that names what the other words do not allow.
    """
    typed = [word for word in words if not is_file(word)]
    files = [word for word in words if is_file(word)]
    of_runs = [file for file in files if Path(file) == stored or is_of_a_run(Path(file))]
    found = {file: _of_file(file, typed, own=file not in of_runs, multirun=multirun) for file in files}
    named = [*(word for file in files if file not in of_runs for word in found[file]), *typed]
    for file in of_runs:
        whose = str(Path(file).parent)
        _check_told(found[file], whose)
        if not as_data and not is_own(Path(file)):
            check_stored(map(_by_section, found[file]), map(_by_section, named), whose)
            found[file] = [word for word in found[file] if not _allows(word)]  # it allows nothing itself
    return [*(word for one in found.values() for word in one), *typed]


def _of_file(file: str, typed: Sequence[str], *, own: bool = False, multirun: bool = False) -> list[str]:
    """A settings file as words, without what the typed words replace. Raises ConfigError: it is none.

    A file of one's `own` may have a section `hydra`, and a defaults list: then it stays a word, too.
    """
    try:
        values = settings_in(_checked_text(Path(file)))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such settings file (looked in {Path.cwd()})") from error
    except (OSError, ValueError, RecursionError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as settings: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no settings: write sections with keys, as `trainer: {{num_steps: 200}}`")
    if not own and isinstance(values.get("hydra"), Mapping):
        refuse_hydra(next(leaves({"hydra": values["hydra"]}))[0])
    words = own_words(hydra_words_in(values)) if own else []
    keys = {word.partition("=")[0] for word in typed}
    hydras = [word for word in words if _is_of(word, multirun) and word.partition("=")[0] not in keys]
    if own and "defaults" in values:
        return [file, *hydras]
    words = [*to_overrides(file, values, typed), *hydras]
    try:
        check_names(words)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return words


def _is_of(word: str, multirun: bool) -> bool:
    """Whether a word of a section `hydra` is of a sweep, or of a single run."""
    return word.startswith(SEARCH_PATH) or word.startswith(("run.dir=", "run.name=")) != multirun


def check_words(stored: Sequence[str], typed: Sequence[str], whose: str) -> list[str]:
    """The words of a run's own command, as `streamrl resume` repeats it, without those that allow it something.

    Raises ConfigError: the typed words do not allow what they name. A settings file among them counts as the run's,
    wherever it lies.
    """
    told = [one for word in stored for one in (_of_file(word, ()) if is_file(word) else [word])]
    _check_told(told, whose)
    check_stored(map(_by_section, told), map(_by_section, typed), whose)
    if any(map(_allows, told)) and any(is_file(word) and not is_of_a_run(Path(word)) for word in stored):
        raise ConfigError(
            f"{whose} is not signed as a run of yours, and sets actors.allow, which permits code, next to a settings "
            "file: give the command yourself, with run.dir=DIRECTORY checkpoint.resume=true"
        )
    return [word for word in stored if not _allows(word)]


def _allows(word: str) -> bool:
    """Whether a word sets `actors.allow`, by its own name or with its section."""
    actors = _by_section(word).get("actors")
    return isinstance(actors, Mapping) and bool(actors.get("allow"))


def _check_told(words: Sequence[str], whose: str) -> None:
    """Raise ConfigError for words of others that are no settings, or that refer to what this machine knows."""
    if (odd := next((word for word in words if word.lstrip("+~").startswith(("-", "hydra"))), None)) is not None:
        raise ConfigError(
            f"{whose} is not signed as a run of yours, and its {odd!r} is not a setting of a run: give the command "
            "yourself, with run.dir=DIRECTORY checkpoint.resume=true"
        )
    # Also as they are parsed: in a word of a command, backslashes may hide one from a look at its text.
    refuse_references([*words, *map(_by_section, words)], whose=f"the settings in {whose}")


def _by_section(word: str) -> dict[str, Any]:
    """The value of a `key=value` word by section, as it is written, for a look at what it names."""
    key, equals, text = word.lstrip("+").partition("=")
    if not equals or key.startswith(("-", "~")):
        return {}
    return nested(key, parse_word(quoted(f"{key}={text}")).value())


def nested(key: str, value: Any) -> dict[str, Any]:
    """The value under the sections of its key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _checked_text(file: Path) -> str:
    """The file's text. Raises ConfigError for one that means too much, YAMLError for one that is no YAML."""
    text = file.read_text(encoding="utf-8")
    too_much = f"it has more than {MAX_CHARS} characters"
    if len(text) <= MAX_CHARS:
        root, too_much = yaml.compose(text, Loader=yaml.SafeLoader), f"its aliases mean more than {MAX_VALUES} values"
        if root is None or _num_values(root, {}) <= MAX_VALUES:
            return text
    raise ConfigError(f"{too_much}: a settings file holds settings only, and each once")


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values in a node with its aliases written out; infinite for one that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        is_mapping = isinstance(node, yaml.MappingNode)
        children = [one for pair in node.value for one in pair] if is_mapping else node.value
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def to_overrides(path: str, values: Mapping[str, Any], typed: Sequence[str]) -> list[str]:
    """The settings of a file that no typed word replaces.

    A run's own `config.yaml` names its directory and says whether it was resumed: that is left out, for a new run.
    """
    keys = {word.partition("=")[0].lstrip("+~") for word in typed}
    replaced = keys.union(*(REPLACES.get(key, ()) for key in keys))
    own_dir = values.get("run", {}).get("dir") if isinstance(values.get("run"), Mapping) else None
    if isinstance(own_dir, str) and Path(path).resolve().parent == Path(os.path.abspath(own_dir)).resolve():
        replaced |= {"run.dir", "checkpoint.resume"}
    return [
        f"{key}={literal(value)}" for key, value in leaves(values)
        if key not in replaced and not key.startswith(tuple(f"{one}." for one in replaced))
    ]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting in nested sections under its whole name, as `policy.optimizer.lr`.

    A mapping with keys that no name can hold, as `{my_package.rewards:short: 0.5}`, is one value.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and all(_NAME.fullmatch(str(inner)) for inner in value):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Texts(yaml.SafeLoader):
    """Every scalar but null is the text that was typed: 1e5, true and 0x10 too."""


_Texts.yaml_implicit_resolvers = {
    first: [one for one in known if one[0] in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def settings_in(text: str) -> Any:
    """The values of a YAML text; settings that are texts hold what was typed."""
    values = OmegaConf.to_container(OmegaConf.create(text))
    if isinstance(values, dict):
        _keep_texts(values, yaml.load(text, Loader=_Texts))
    return values


def _keep_texts(values: dict[str, Any], typed: Any, prefix: str = "") -> None:
    """Put what was typed, in which every scalar is a text, in the place of values of settings that are texts."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(typed, Mapping):
            _keep_texts(value, typed.get(key), f"{prefix}{key}.")
        elif f"{prefix}{key}" in texts() and isinstance(typed, Mapping):
            values[key] = typed[key]
