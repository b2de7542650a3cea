"""The door to hydra and omegaconf: overrides in, plain dataclasses out.

`configs/` is composed over the dataclass schema, so an unknown key cannot enter. Overrides are checked against the
schema before hydra parses them: hydra's message names no remedy, ours the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from streamrl.config.addresses import hide_keys
from streamrl.config.aliases import nearest, suggestion
from streamrl.config.rules import check
from streamrl.config.schema import Config, EnvConfig
from streamrl.config.settings_file import (
    as_typed,
    as_words,
    checked_text,
    disowned,
    given_values,
    is_file,
    keep_texts,
    key_given_twice,
    literal,
    lost_of_recipe,
    parts_of,
    quote_each,
    quote_texts,
)
from streamrl.config.wording import (
    field_sentences,
    one_line,
    refuse_file,
    refuse_hydra,
    refuse_option,
    refuse_removal,
    refuse_several,
    refuse_type,
    refuse_unreadable,
    refuse_word,
    type_name,
)
from streamrl.errors import ConfigError
from streamrl.named_code import check_stored, is_of_a_run, is_own, refuse_references

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""Found by its path: in a user's script a folder `configs` of the user's comes first on the import path."""

GROUPS = ("experiment", "algorithm")
"""Config groups under configs/: `experiment=quickstart` picks configs/experiment/quickstart.yaml."""
PATHS = ("data.path", "data.test_path")
"""Settings of several types, of which a scalar is a path."""
ALLOW = "actors.allow="
FORM = ("apply_chat_template", "system_prompt", "chat_template")
"""Of `data`: how a prompt reads, which fits the task that an experiment set it for."""


ConfigStore.instance().store(name="schema", node=Config)  # configs/config.yaml composes over it by this name


def as_omegaconf(values: Mapping[str, Any]) -> DictConfig:
    """Values as files of other projects expect their settings."""
    return OmegaConf.create(dict(values))


def load_config(overrides: Sequence[str] = (), *, notify: Callable[[str], None] = lambda _: None) -> Config:
    """Compose configs/ with `key=value` overrides; a word that ends in .yaml is a settings file, below them.

    `notify` gets a sentence on what was left out of the experiment because the overrides name another task, and on
    what the experiment sets in place of the recipe that they name.

    Raises ConfigError: an unknown key (with the nearest valid one), a value of the wrong type, a broken rule, or a
    name in a run's settings that the overrides do not allow.
    """
    return _loaded(read_files(overrides), notify)


def load_run_config(run_dir: str | Path, words: Sequence[str] = ()) -> Config:
    """The settings in a run directory, or in an unpacked bundle, with `words` of the command line on top.

    Raises ConfigError: what `load_config` does. It is not asked whether the directory looks like that of a run, which
    its author decides.
    """
    file = Path(run_dir) / "config.yaml"
    return _loaded(read_files([str(file), *words], stored=file), lambda _: None)


def run_settings(run_dir: str | Path) -> Config:
    """The settings in a run directory as data, to be compared or listed: nothing that they name may be made of them.

    Raises ConfigError: they cannot be read.
    """
    file = Path(run_dir) / "config.yaml"
    words = read_files([str(file)], stored=file, as_data=True)
    return _loaded(words, lambda _: None, whole=False)


def check_words(stored: Sequence[str], typed: Sequence[str], whose: str) -> list[str]:
    """The words of a run's own command, as `streamrl resume` repeats it, without those that allow it something.

    Raises ConfigError: the typed words do not allow what they name. A settings file among them counts as the run's,
    wherever it lies.
    """
    told = [one for word in stored for one in (_of_file(word, ()) if is_file(word) else [word])]
    _check_told(told, whose)
    check_stored(map(_nested, told), map(_nested, typed), whose)
    if any(map(_allows, told)) and any(is_file(word) and not is_of_a_run(Path(word)) for word in stored):
        raise ConfigError(
            f"{whose} is not signed as a run of yours, and allows itself code by actors.allow beside a settings file: "
            "give the command yourself, with run.dir=DIRECTORY checkpoint.resume=true"
        )
    return [word for word in stored if not _allows(word)]


def _allows(word: str) -> bool:
    """Whether a word sets `actors.allow`, by its own name or with its section."""
    actors = _nested(word).get("actors")
    return isinstance(actors, Mapping) and bool(actors.get("allow"))


def _check_told(words: Sequence[str], whose: str) -> None:
    """Raise ConfigError for words of others that are no settings, or that refer to what this machine knows."""
    if (odd := next((word for word in words if word.lstrip("+~").startswith(("-", "hydra"))), None)) is not None:
        raise ConfigError(
            f"{whose} is not signed as a run of yours, and {odd!r} there is no setting of a run: give the command "
            "yourself, with run.dir=DIRECTORY checkpoint.resume=true"
        )
    # Also as they are parsed: in a word of a command, backslashes may hide one from a look at its text.
    refuse_references([*words, *map(_nested, words)], whose=f"the settings in {whose}")


def _loaded(overrides: list[str], notify: Callable[[str], None], *, whole: bool = True) -> Config:
    """The config of words without files."""
    check_overrides(overrides)
    _check_values(overrides)
    try:
        config, experiment = _composed(hydra_overrides(overrides)), _chosen("experiment", overrides)
        config = _with_overrides_first(config, overrides, experiment.get("env", {}))
        if dropped := _drop_form(config, experiment, given_values(overrides)):
            notify(f"this is not the task of the experiment, whose {', '.join(dropped)} are left out")
        for key, (word, value) in disowned(_chosen("algorithm", overrides), given_values(overrides)).items():
            section, _, name = key.rpartition(".")
            known = OmegaConf.select(_schema(), section)
            if name in known:
                OmegaConf.update(config, key, known[name])
            else:  # of an open mapping
                left = {one: value for one, value in OmegaConf.select(config, section).items() if one != name}
                OmegaConf.update(config, section, left, merge=False)
            notify(f"{word} leaves out the recipe's {key}={json.dumps(value, default=list)}")
        if lost := lost_of_recipe(_chosen("algorithm", overrides), experiment, given_values(overrides)):
            keys = " and ".join(word.partition("=")[0] for word in lost)
            notify(f"the experiment overrides the recipe's {keys}; add {' '.join(lost)} to get it back")
        return to_config(config, whole=whole)
    except HydraException as error:
        _check_types(overrides)
        raise ConfigError(plain_message(error)) from error


def _composed(words: Sequence[str]) -> DictConfig:
    """As hydra composes them. Files take most of its time: groups are composed once, and values are set in a copy."""
    overrides = OverridesParser.create().parse_overrides(list(words))
    values = [one for one in overrides if one.key_or_group not in GROUPS]
    if any(one.is_sweep_override() or one.type not in (OverrideType.CHANGE, OverrideType.FORCE_ADD) for one in values):
        return _composed_by_hydra(tuple(words))
    found = deepcopy(_composed_by_hydra(tuple(str(one.input_line) for one in overrides if one not in values)))
    try:
        for one in values:
            added = one.type == OverrideType.FORCE_ADD
            OmegaConf.update(found, one.key_or_group, one.value(), merge=True, force_add=added)
    except OmegaConfBaseException:
        return _composed_by_hydra(tuple(words))  # which says what is wrong
    return found


@cache
def _composed_by_hydra(words: tuple[str, ...]) -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides=list(words))


def read_files(words: Sequence[str], *, stored: Path | None = None, as_data: bool = False) -> list[str]:
    """The words, each settings file among them replaced by what it sets.

    Args:
        stored: the one among the files that a run directory holds, whatever else is there.
        as_data: its settings are only looked at, not used.
    Raises:
        ConfigError: a file that it cannot be, or one of a run that names what the other words do not allow.
    """
    typed = [word for word in words if not is_file(word)]
    found = {word: _of_file(word, typed) for word in words if is_file(word)}
    of_runs = [file for file in found if Path(file) == stored or is_of_a_run(Path(file))]
    named = [*(word for file in found if file not in of_runs for word in found[file]), *typed]
    for file in of_runs:
        whose = str(Path(file).parent)
        _check_told(found[file], whose)
        if not as_data and not is_own(Path(file)):
            check_stored(map(_nested, found[file]), map(_nested, named), whose)
            found[file] = [word for word in found[file] if not _allows(word)]  # it allows nothing itself
    return [*(word for one in found.values() for word in one), *typed]


def _of_file(file: str, typed: Sequence[str]) -> list[str]:
    """A settings file as words, without what the typed words replace. Raises ConfigError: it is none."""
    try:
        text = checked_text(Path(file))
        values = OmegaConf.to_container(OmegaConf.create(text))
        if isinstance(values, dict):
            keep_texts(values, as_typed(text), texts())
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such settings file (looked in {Path.cwd()})") from error
    except (OSError, ValueError, RecursionError, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as settings: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no settings: write sections with keys, as `trainer: {{num_steps: 200}}`")
    own = as_words(file, values, typed)
    try:
        check_overrides(own)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return own


def _nested(word: str) -> dict[str, Any]:
    """The value of a `key=value` word by section, as it is written, for a look at what it names."""
    key, equals, text = word.lstrip("+").partition("=")
    if not equals or key.startswith(("-", "~")):
        return {}
    nested = _parse(_quoted(f"{key}={text}")).value()
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def hydra_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides in hydra's grammar, which wants keys of an open mapping marked as added.

    It cannot read every text, such as a path with ~ or parentheses, and reads others as numbers: what a setting takes
    as text is quoted then.
    """
    words = map(_quoted, overrides)
    return [f"++{word}" if word.replace("=", ".", 1).startswith(open_mappings()) else word for word in words]


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    try:
        found = _parse(word)._value
    except HydraException:
        kind = {name: kind for name, kind, _, _ in settings()}.get(key, "str")  # of an open mapping, whatever it is
        if not kind.startswith(("str", "Any", "list")) or value[:1] in ("{", "'", '"'):
            refuse_unreadable(key, value)
        listed = value.startswith("[") and value.endswith("]") and not kind.startswith("str")
        if not listed and value.startswith("["):
            refuse_unreadable(key, value)
        whole = literal(value) if kind.startswith("str") else ",".join(map(_element, parts_of(value)))
        readable = f"{key}=[{','.join(map(_element, parts_of(value[1:-1])))}]" if listed else f"{key}={whole}"
        try:
            _parse(readable)
        except HydraException:
            refuse_unreadable(key, value)
        return readable
    name = key.lstrip("+")
    if name not in texts() or (name in _lists_of_texts() and not isinstance(found, list | ChoiceSweep)):
        return word
    if isinstance(found, ChoiceSweep):
        listed = re.fullmatch(r"choice\((.*)\)", value, re.DOTALL)
        start, inner, end = ("choice(", listed[1], ")") if listed else ("", value, "")
        return f"{key}={start}{quote_each(inner, found.list)}{end}"
    return f"{key}={quote_texts(value, found)}"


def _element(text: str) -> str:
    """One of the values between commas, in quotes if the grammar cannot read it."""
    try:
        _parse(f"value=[{text}]")
    except HydraException:
        return literal(text)
    return text


def _with_overrides_first(composed: DictConfig, overrides: Sequence[str], task: Mapping[str, Any]) -> DictConfig:
    """The composed config without what an override replaces by another setting: a model, a task, a task's options."""
    # `task` is the section `env` below the overrides.
    given = given_values(overrides)
    policy, env = composed.policy, composed.env
    if "policy.tiny.enabled" not in given and "policy.model_path" in given and policy.model_path is not None:
        policy.tiny.enabled = False
    if "policy.model_path" not in given and "policy.tiny.enabled" in given and policy.tiny.enabled:
        policy.model_path = None
    if "env.path" not in given and "env.name" in given:
        env.path = None
    if _names_other_task(env, task, given) or "env.options" in given:
        own = {key.split(".")[2] for key in given if key.startswith("env.options.")}
        if "env.options" in given:
            own |= set(_parse(f"env.options={given['env.options']}").value())
        env.options = {key: value for key, value in env.options.items() if key in own}
    _drop_other_records(composed, set(given))
    return composed


def _drop_other_records(composed: DictConfig, given: set[str]) -> None:
    """Leave out the records and the reward of an experiment that an override replaces by others."""
    data, reward, env = composed.data, composed.reward, composed.env
    names_reward = any(key.startswith(("reward.type", "reward.weights")) for key in given)
    if "env.name" in given and "data.path" not in given and "env.path" not in given:
        data.path = data.test_path = None  # a task by name brings its own
        if not names_reward:
            reward.type, reward.weights = None, {}
    if "data.path" in given:
        data.test_path = data.test_path if "data.test_path" in given else None
        data.weights = data.weights if "data.weights" in given else None
    if "env.path" in given and not names_reward:
        reward.type, reward.weights = None, {}
    if names_reward and "env.path" not in given and (reward.type or reward.weights):
        env.path = None


def _drop_form(composed: DictConfig, experiment: Mapping[str, Any], given: Mapping[str, str]) -> list[str]:
    """Set the form that the experiment gives its own task back to the defaults; returns it as `key=value`.

    A stop text, such as the end of a line, leaves nothing of an answer of another form; its length goes with it.
    """
    if "data.path" not in given and not _names_other_task(composed.env, experiment.get("env", {}), given):
        return []
    keys = [f"data.{key}" for key in experiment.get("data", {}) if key in FORM]
    for split in ("rollout.train.sampling", "rollout.test.sampling"):
        sampling = OmegaConf.select(experiment, split, default={})
        keys += [f"{split}.{key}" for key in ("stop", "max_new_tokens") if "stop" in sampling and key in sampling]
    defaults, dropped = _schema(), []
    for key in keys:
        if not any(f"{key}.".startswith(f"{one}.") for one in given):
            dropped.append(f"{key}={json.dumps(OmegaConf.select(experiment, key), default=list)}")
            OmegaConf.update(composed, key, OmegaConf.select(defaults, key))
    return dropped


def _names_other_task(env: Any, before: Mapping[str, Any], given: Mapping[str, str]) -> bool:
    """Whether overrides replace the task that the section `env` names without them."""
    own = {"name": EnvConfig().name, "path": None, **before}
    return any(f"env.{key}" in given and env[key] != own[key] for key in ("name", "path"))


def _chosen(group: str, overrides: Sequence[str]) -> DictConfig:
    """The experiment or recipe that is asked for by name, as its file has it."""
    names = [override.removeprefix(f"{group}=") for override in overrides if override.startswith(f"{group}=")]
    file = CONFIGS / group / f"{names[-1] if names else None}.yaml"
    return OmegaConf.create(file.read_text() if file.is_file() else "{}")


def to_config(composed: DictConfig, *, whole: bool = True) -> Config:
    """The dataclass of a composed config, checked if it is that of a `whole` run; no DictConfig passes this point."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(plain_message(error)) from error
    assert isinstance(config, Config), f"configs/config.yaml does not compose over the schema but over {type(config)}"
    hide_keys(config)
    if whole:
        check(config)
    return config


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError, with the nearest valid key, for the first override that names no setting."""
    keys = setting_names()
    for override, following in zip_longest(overrides, overrides[1:], fillvalue=""):
        if override.startswith("-"):
            refuse_option(override, following, nearest(override.lstrip("-").partition("=")[0], keys))
        key, equals, _ = override.partition("=")
        key = key.lstrip("+~")
        if key.startswith(("hydra.", "hydra/")):
            refuse_hydra(key)
        if key in GROUPS:
            continue
        if not equals and not override.startswith("~"):
            refuse_word(override, group_files("experiment"))
        if key not in keys and not key.startswith(open_mappings()):
            raise ConfigError(f"Unknown key `{key}`: {nearest_setting(key)}")


def _check_values(overrides: Sequence[str]) -> None:
    """Raise ConfigError for the first override that no run can have, whatever its setting's type."""
    for word in overrides:
        key, _, text = word.lstrip("+~").partition("=")
        if word.startswith("~") and not key.startswith(open_mappings()):
            refuse_removal(key)
        if word.startswith("~"):
            continue
        try:
            parsed = _parse(_quoted(f"{key}={text}"))
        except HydraException:  # a name that is no key, as one that begins with a digit
            refuse_unreadable(key, text)
        if (name := key_given_twice(text)) is not None:
            raise ConfigError(f"{key}={text} names {name} twice: give each its own name.")
        if parsed.is_sweep_override():
            refuse_several(key, text)
        if key in GROUPS and str(parsed.value()) not in group_files(key):
            refuse_file(key, str(parsed.value()), group_files(key))


def algorithm_preset(name: str) -> Config:
    """A file of configs/algorithm over the defaults: part of a config, unchecked."""
    return OmegaConf.to_object(OmegaConf.merge(_schema(), OmegaConf.load(CONFIGS / "algorithm" / f"{name}.yaml")))


def group_files(group: str) -> list[str]:
    """The names in a group of configs/."""
    return [file.stem for file in (CONFIGS / group).glob("*.yaml")]


def _check_types(overrides: Sequence[str]) -> None:
    """Raise ConfigError for the first override whose setting cannot hold its value."""
    rows = {row[0]: row for row in settings()}
    for word in overrides:
        key, _, text = word.lstrip("+").partition("=")
        if key not in setting_names():
            continue
        try:
            OmegaConf.to_object(OmegaConf.merge(_schema(), OmegaConf.create(_nested(word))))
        except OmegaConfBaseException:
            refuse_type(rows.get(key, (key, "dict", {}, "A section.")), text)


@cache
def _parse(word: str) -> Any:
    return OverridesParser.create().parse_override(word)


def nearest_setting(key: str) -> str:
    """The setting that was probably meant, as the end of a sentence."""
    return suggestion(key, setting_names())


@cache
def setting_names() -> frozenset[str]:
    """Dotted names of every setting and section."""
    parts = [name.split(".") for name, _, _, _ in settings()]
    return frozenset(".".join(one[:end]) for one in parts for end in range(1, len(one) + 1))


@cache
def texts() -> frozenset[str]:
    """Names of the settings that are texts, or lists of them: what is typed there is no number and no truth value."""
    kinds = {name: kind for name, kind, _, _ in settings()}
    return frozenset(name for name in kinds if kinds[name].startswith("str") or name in PATHS) | _lists_of_texts()


@cache
def _lists_of_texts() -> frozenset[str]:
    return frozenset(name for name, kind, _, _ in settings() if kind == "list[str]")


@cache
def open_mappings() -> tuple[str, ...]:
    """Prefixes of settings that take any key (`env.options.`); their reader checks the keys."""
    return tuple(f"{name}." for name, _, default, _ in settings() if isinstance(default, dict))


def settings(section: Any = None, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """(dotted name, type, default, sentence) of every setting of a section, by default of all, in schema order."""
    section = Config() if section is None else section
    sentences = {}
    for cls in reversed(type(section).__mro__[:-1]):  # a section may extend another
        sentences |= field_sentences(cls)
    hints = typing.get_type_hints(type(section))
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{item.name}.")
        else:
            default = value.name if isinstance(value, Enum) else value
            yield f"{prefix}{item.name}", type_name(hints[item.name]), default, sentences.get(item.name, "")


def to_plain(config: Any) -> Any:
    """A config, a section of it or a value there as JSON-able values: enums by name."""
    if dataclasses.is_dataclass(config):
        return {field.name: to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(value) for value in config]
    return config.name if isinstance(config, Enum) else config


@cache
def _schema() -> DictConfig:
    """Every setting at its default, as omegaconf merges over it, which copies it: making it takes longer than that."""
    return OmegaConf.structured(Config)


def from_plain(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The inverse of `to_plain`, with overrides on top (an actor's own settings over the learner's)."""
    refuse_references(values, whose="the settings")
    return _on_top(values, _from_dotlist, overrides)


def _from_dotlist(words: list[str]) -> DictConfig:
    """The values of words in YAML's grammar."""
    found = OmegaConf.from_dotlist(words)
    for key, text in given_values(words).items():
        if key in texts() and not isinstance(typed := as_typed(text), Mapping):
            OmegaConf.update(found, key, typed)
    return found


def with_settings(config: Config, values: Mapping[str, Any], *, whole: bool = True) -> Config:
    """The config with nested settings on top; they replace what their words on a command line would.

    Args:
        whole: false for a config of which only some sections are those of a run.
    Raises:
        ConfigError: as `load_config` does.
    """
    return _on_top(to_plain(config), lambda _: values, as_words("", values, ()), whole=whole)


def _on_top(
    below: Mapping[str, Any], values_of: Callable[[list[str]], Any], words: Sequence[str], *, whole: bool = True
) -> Config:
    """The config of plain values with those of the words on top."""
    check_overrides(words)
    try:
        merged = OmegaConf.merge(_schema(), dict(below), values_of(list(words)))
    except OmegaConfBaseException as error:
        _check_types(words)
        raise ConfigError(plain_message(error)) from error
    assert isinstance(merged, DictConfig)
    return to_config(_with_overrides_first(merged, words, below.get("env", {})), whole=whole)


def to_yaml(config: Config) -> str:
    """The resolved config as YAML, for the run directory."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def plain_message(error: Exception) -> str:
    """hydra's or omegaconf's message in one line that names the key."""
    text, names = one_line(error)
    keys = setting_names()
    for name in names:
        if name not in keys and not f"{name}.".startswith(open_mappings()):
            return f"Unknown key `{name}`: {nearest_setting(name)}"
        if name not in text:
            text = f"{name}: {text}"
    return text
