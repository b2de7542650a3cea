"""The door to the settings: words and files in, plain dataclasses out.

The defaults of the schema, a recipe and an experiment of `configs/`, settings files and words are laid over each other
as nested plain values. Their names are checked against the schema first, for a refusal with the nearest valid key;
`msgspec.convert` then checks every type and range at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from streamrl.config.addresses import hide_keys
from streamrl.config.catalog import kinds, open_mappings, settings
from streamrl.config.composition import compose, group_values, is_choice
from streamrl.config.devices import AUTO, Choice, planned, settle
from streamrl.config.overrides import REMOVED, REMOVES_NOTHING, check_name, leaves, nested, parse_overrides, read_files
from streamrl.config.rules import check
from streamrl.config.schema import Config, EnvConfig
from streamrl.errors import ConfigError, in_one_line
from streamrl.extension import did_you_mean
from streamrl.named_code import check_stored, refuse_references

FORM = ("apply_chat_template", "system_prompt", "chat_template")
"""Of `data`: how a prompt reads, which fits the task that an experiment set it for."""
BOUNDS = {">": "greater than", ">=": "at least", "<": "less than", "<=": "at most"}
TYPES = {
    "int": ("a whole number", "10"), "float": ("a number", "0.5"), "bool": ("true or false", "true"),
    "str": ("a text", "text"),
}
"""Type of a setting -> how it is called, and an example."""
TRUTH = {**dict.fromkeys(("true", "on", "yes", "y"), True), **dict.fromkeys(("false", "off", "no", "n"), False)}
OWNED: Sequence[tuple[str, str | None, Sequence[str]]] = (
    ("kl.mode", "off", ("kl.coef", "kl.controller", "kl.options", "kl.allow_biased")),
    ("loss.surrogate", None, ("loss.options", "loss.cap")), ("loss.opsm_delta", "null", ("loss.opsm_when",)),
    ("advantage.estimator", None, ("advantage.rho_bar_pg", "advantage.options")),
    *(("advantage.estimator", name, ("critic", "advantage.lam"))
      for name in ("group", "optimal", "reinforce_pp", "vtrace_critic_free")),
    ("entropy.adapt", "none", ("entropy.target", "entropy.step", "entropy.low", "entropy.high")),
    ("distill.teacher", "null", ("distill.coef", "distill.center", "distill.reward_weight")),
)
"""A setting, its value (None: any), and what a recipe has set for another value of it, which then does nothing."""
TRAINS = (
    "trainer", "rollout", "overlong", "objectives", "staleness", "advantage", "critic", "loss", "shadow", "kl",
    "reference", "distill", "entropy", "constraint", "policy", "learner", "publish",
)
"""Sections that say how batches become weights."""
HERE = (
    "policy.model_path", "policy.tokenizer_path", "policy.tiny", "reference.model_path", "critic.model_path",
    "distill.teacher", "learner.mesh",
)
"""Settings in them that fit the machine: where models lie, how many ranks there are."""


def load_config(overrides: Sequence[str] = (), *, notify: Callable[[str], None] = lambda _: None) -> Config:
    """Compose configs/ with `key=value` overrides; a word that ends in .yaml is a settings file, below them.

    `notify` gets a sentence on what was left out of the experiment because the overrides name another task, and on
    what the experiment sets in place of the recipe that they name.

    Raises ConfigError: an unknown key (with the nearest valid one), a value of the wrong type, a broken rule, or a
    name in a run's settings that the overrides do not allow.
    """
    loaded = load_with_choices(overrides, notify=notify)
    for one in loaded.choices:
        notify(f"{one.word}: {one.why}")
    return loaded.config


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and what is chosen for this machine.

    Attributes:
        choices: what `auto` is here, where a GPU leaves a choice.
        open: settings that nothing gives and the planner may choose; their defaults stand in the config.
    """

    config: Config
    choices: list[Choice]
    open: list[str]


def load_with_choices(overrides: Sequence[str], *, notify: Callable[[str], None] = lambda _: None) -> Loaded:
    """`load_config`, whose `notify` does not get the choices."""
    return _loaded(read_files(overrides), notify)


def load_partial(overrides: Sequence[str]) -> Config:
    """`load_config` for settings that need not be those of a whole run, to be looked at."""
    return _loaded(read_files(overrides), lambda _: None, whole=False).config


def load_run_config(run_dir: str | Path, words: Sequence[str] = ()) -> Config:
    """The settings in a run directory, or in an unpacked bundle, with `words` of the command line on top.

    Raises ConfigError: what `load_config` does. It is not asked whether the directory looks like that of a run, which
    its author decides.
    """
    file = Path(run_dir) / "config.yaml"
    return _loaded(read_files([str(file), *words], stored=file), lambda _: None).config


def settings_then(config: Config, then: Mapping[str, Any], keep: Iterable[str], whose: str) -> Config:
    """A run's settings now, with those by which an earlier start trained in place of them.

    Args:
        then: the plain settings that a log holds of the start.
        keep: names of settings that stay as they are now.
    Raises:
        ConfigError: they name code that the run of now does not, or are no settings.
    """
    now, told = to_plain(config), {name: then[name] for name in TRAINS if name in then}
    refuse_references(told, whose=whose)
    check_stored([told], [now], whose)
    mixed = json.loads(json.dumps({**now, **told}))
    for name in (*HERE, *keep):
        *path, last = name.split(".")
        above, below = mixed, now
        for part in path:
            above, below = above.setdefault(part, {}), below.get(part) or {}
        if last in below:
            above[last] = below[last]
    found = _converted(mixed)
    _finish(found, whole=False)
    return found


def run_settings(run_dir: str | Path) -> Config:
    """The settings in a run directory as data, to be compared or listed: nothing that they name may be made of them.

    Raises ConfigError: they cannot be read.
    """
    file = Path(run_dir) / "config.yaml"
    return _loaded(read_files([str(file)], stored=file, as_data=True), lambda _: None, whole=False).config


def recorded(run_dir: str | Path, keys: Iterable[str]) -> list[Choice]:
    """The values with which the run in this directory began; none if it has not begun."""
    if not (Path(run_dir) / "config.yaml").exists():
        return []
    config = run_settings(run_dir)
    return [Choice(key, attrgetter(key)(config), "as the run began") for key in keys]


def from_plain(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The inverse of `to_plain`, with overrides on top (an actor's own settings over the learner's)."""
    refuse_references(values, whose="the settings")
    if (choice := next((word for word in overrides if is_choice(word, ())), None)) is not None:
        raise ConfigError(f"`{choice}` stands for a whole run, whose settings are given: name the settings that differ")
    given = parse_overrides(overrides)
    config = _converted(_laid_over(values, given))
    config = _with_overrides_first(config, dict(given), values.get("env", {}))
    _finish(config)
    return config


def with_settings(config: Config, values: Mapping[str, Any], *, whole: bool = True) -> Config:
    """The config with nested settings on top; they replace what their words on a command line would.

    Args:
        whole: false for a config of which only some sections are those of a run.
    Raises:
        ConfigError: as `load_config` does.
    """
    found = _converted(_merged(to_plain(config), values))
    found = _with_overrides_first(found, dict(leaves(values)), to_plain(config.env))
    _finish(found, whole=whole)
    return found


def algorithm_preset(name: str) -> Config:
    """A file of configs/algorithm over the defaults: part of a config, unchecked."""
    return _converted(_merged(to_plain(Config()), group_values("algorithm", name)))


def _loaded(words: list[str], notify: Callable[[str], None], *, whole: bool = True) -> Loaded:
    """The config of words, whose files are only those with a defaults list."""
    pairs = parse_overrides(words)
    composed, given = compose(words), dict(pairs)
    recipe, experiment = composed.of_group("algorithm"), composed.of_group("experiment")
    for key, value in pairs:  # a word that a later one replaces must be right, too
        if value is not given[key]:
            _converted(nested(key, value))
    config = _converted(_laid_over(_merged(to_plain(Config()), composed.values), pairs))
    config = _with_overrides_first(config, given, composed.values.get("env", {}))
    if dropped := _drop_form(config, experiment, given):
        notify(f"this is not the task of the experiment, whose {', '.join(dropped)} are left out")
    for key, (word, value) in _disowned(recipe, given).items():
        _set_default(config, key)
        notify(f"{word} leaves out the recipe's {key}={json.dumps(value)}")
    if "algorithm" in composed.asked and (lost := _overridden_recipe_keys(recipe, experiment, given)):
        keys = " and ".join(word.partition("=")[0] for word in lost)
        notify(f"the experiment overrides the recipe's {keys}; add {' '.join(lost)} to get it back")
    choices = _finish(config, whole=whole)
    named = {*dict(leaves(composed.values))} - {word.partition("=")[0] for word in dropped}
    named = named.union(*(dict(leaves(nested(key, value))) for key, value in given.items()))
    return Loaded(config, choices, [key for key in planned(config) if key not in named])


def _finish(config: Config, *, whole: bool = True) -> list[Choice]:
    """Choose for this machine what is left to it, and check the config if it is that of a `whole` run."""
    hide_keys(config)
    choices = settle(config)
    if whole:
        check(config)
    return choices


# --- layers of plain values -------------------------------------------------------------------------------------------


def _merged(below: Any, above: Any) -> Any:
    """Mappings key by key, in sections of any depth; of everything else what lies above."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _laid_over(values: Mapping[str, Any], given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The values with what the words say on top, one after the other."""
    found = dict(values)
    for key, value in given:
        if value is REMOVED:
            *sections, name = key.split(".")
            section: Any = found
            for part in sections:
                section = section.get(part) if isinstance(section, dict) else None
            if not isinstance(section, dict) or name not in section:
                raise ConfigError(REMOVES_NOTHING.format(key))
            del section[name]
        else:
            found = _merged(found, nested(key, value))
    return found


def _converted(values: Mapping[str, Any]) -> Config:
    """The dataclass of nested values; what they leave out is as the schema has it. Raises ConfigError."""
    for name, _ in leaves(values):
        check_name(name)
    if "${" in repr(values):  # a reference to an environment variable, or to another setting
        try:
            whole = {**_merged(to_plain(Config()), values), "hydra": {"job": {"name": "${run.name}"}}}
            found = OmegaConf.to_container(OmegaConf.create(whole), resolve=True)
            values = {key: value for key, value in found.items() if key != "hydra"}
        except OmegaConfBaseException as error:
            raise ConfigError(f"give a value for the reference ${{...}} in it: {in_one_line(error)}") from error
    values = _as_typed(values)
    try:
        return msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        name = re.search(r"`\$\.([\w.]+)", str(error))[1]
        value: Any = values
        for part in name.split("."):
            value = value[part]
        _refuse_value(name, value, re.match(r"Expected `\w+` ([<>]=?) (\S+)", str(error)))


def _refuse_value(name: str, value: Any, bound: re.Match[str] | None) -> NoReturn:
    """A value of another type than the setting's, or beyond the `bound` that msgspec names."""
    rows = {row[0]: row for row in settings()}
    _, kind, default, sentence = rows.get(name, (name, "dict", {}, "A section."))
    parts, given = kind.split("|"), f"{name}={_shown(value)}"
    if bound is not None:
        allowed = "finite" if "e+300" in bound[2] else f"{BOUNDS[bound[1]]} {bound[2].removesuffix('.0')}"
    elif kind.startswith("list"):
        allowed = f"a list, e.g. {name}=[a,b]"
    elif kind == "dict[str, float]" and isinstance(value, Mapping):
        allowed = "a mapping from names to numbers; a name with a colon, as your own module:function, goes into a " \
                  "settings file"
    elif kind.startswith("dict"):
        allowed = f"a mapping, e.g. {name}.key=value"
    elif any(part in TYPES for part in parts):
        known = " or ".join(TYPES[part][0] if part in TYPES else part for part in parts)
        allowed = f"{known}, e.g. {name}={TYPES[parts[0]][1] if default is None else str(default).lower()}"
    else:
        near = did_you_mean(_shown(value), parts)
        raise ConfigError(f"{given} is unknown.{near} Choose one of {', '.join(parts)}. {sentence}")
    raise ConfigError(f"{given} must be {allowed}. {sentence}")


def _shown(value: Any) -> str:
    """A value as a person would type it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _as_typed(values: Any, name: str = "") -> Any:
    """The values with a number that is meant as a text as one, and yes, no, on and off as truth values."""
    kind = kinds().get(name, "section")
    if isinstance(values, Mapping) and kind == "section" and not f"{name}.".startswith(open_mappings()):
        return {key: _as_typed(value, f"{name}.{key}" if name else key) for key, value in values.items()}
    if values == "auto" and name.endswith(".transports"):
        return [*AUTO]
    if kind.startswith("list[str]") and isinstance(values, list):
        return [str(one) if isinstance(one, int | float) else one for one in values]
    if kind.startswith("str") and isinstance(values, int | float):
        return str(values)
    if kind.startswith("bool") and isinstance(values, str):
        return TRUTH.get(values.lower(), values)
    return values


# --- what an override replaces ----------------------------------------------------------------------------------------


def _with_overrides_first(config: Config, given: Mapping[str, Any], task: Mapping[str, Any]) -> Config:
    """The config without what an override replaces by another setting: a model, a task, a task's options."""
    # `task` is the section `env` below the overrides.
    policy, env = config.policy, config.env
    if "policy.tiny.enabled" not in given and "policy.model_path" in given and policy.model_path is not None:
        policy.tiny.enabled = False
    if "policy.model_path" not in given and "policy.tiny.enabled" in given and policy.tiny.enabled:
        policy.model_path = None
    if "env.path" not in given and "env.name" in given:
        env.path = None
    if _names_other_task(env, task, given) or "env.options" in given:
        own = {key.split(".")[2] for key in given if key.startswith("env.options.")}
        if "env.options" in given:
            own |= set(given["env.options"])
        env.options = {key: value for key, value in env.options.items() if key in own}
    _drop_other_records(config, set(given))
    return config


def _drop_other_records(config: Config, given: set[str]) -> None:
    """Leave out the records and the reward of an experiment that an override replaces by others."""
    data, reward, env = config.data, config.reward, config.env
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


def _drop_form(config: Config, experiment: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Set the form that the experiment gives its own task back to the defaults; returns it as `key=value`.

    A stop text, such as the end of a line, leaves nothing of an answer of another form; its length goes with it.
    """
    if "data.path" not in given and not _names_other_task(config.env, experiment.get("env", {}), given):
        return []
    own = dict(leaves(experiment))
    keys = [key for key in own if key.startswith("data.") and key.partition(".")[2] in FORM]
    for split in ("rollout.train.sampling", "rollout.test.sampling"):
        keys += [key for key in (f"{split}.stop", f"{split}.max_new_tokens") if {f"{split}.stop", key} <= {*own}]
    keys = [key for key in keys if own[key] != "auto"]  # the reward's, whatever the records are
    dropped = [key for key in keys if not any(f"{key}.".startswith(f"{one}.") for one in given)]
    for key in dropped:
        _set_default(config, key)
    return [f"{key}={json.dumps(own[key])}" for key in dropped]


def _set_default(config: Config, key: str) -> None:
    """Set a setting back to the schema's default; a key of an open mapping has none, and goes."""
    section, _, name = key.rpartition(".")
    found = attrgetter(section)(config)
    if isinstance(found, dict):
        found.pop(name, None)
    else:
        setattr(found, name, attrgetter(key)(Config()))


def _names_other_task(env: EnvConfig, before: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether overrides replace the task that the section `env` names without them."""
    own = {"name": EnvConfig().name, "path": None, **before}
    return any(f"env.{key}" in given and getattr(env, key) != own[key] for key in ("name", "path"))


def _overridden_recipe_keys(
    recipe: Mapping[str, Any], experiment: Mapping[str, Any], given: Mapping[str, Any]
) -> list[str]:
    """Settings of the recipe, as `key=value`, that the experiment sets otherwise and no override gives."""
    own, others = dict(leaves(recipe)), dict(leaves(experiment))
    return [
        f"{key}={json.dumps(value)}" for key, value in own.items()
        if key in others and others[key] != value and key not in given
    ]


def _disowned(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Settings of the recipe that an override of another one leaves without effect: that override, and the value."""
    own, found = dict(leaves(recipe)), dict[str, tuple[str, Any]]()
    for switch, wanted, names in OWNED:
        word = _shown(given.get(switch))
        if switch not in given or word != (wanted or word) or (switch in own and word == _shown(own[switch])):
            continue
        for key, value in own.items():
            if any(f"{key}.".startswith(f"{name}.") for name in names) and key not in given:
                found[key] = (f"{switch}={word}", value)
    return found


# --- plain values and YAML --------------------------------------------------------------------------------------------


def to_plain(config: Any) -> Any:
    """A config, a section of it or a value there as JSON-able values: enums by name."""
    if is_dataclass(config):
        return {field.name: to_plain(getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, Mapping):
        return {key: to_plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(value) for value in config]
    return config.name if isinstance(config, Enum) else config


def to_yaml(config: Config) -> str:
    """The resolved config as YAML, for the run directory."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def composed_yaml(words: Sequence[str], *, resolves: bool) -> str:
    """The settings of these words as YAML; unless it `resolves` them, references such as ${oc.env:HOME} as written.

    They need not be whole: a look at the defaults names no model.
    """
    words = read_files(words)
    loaded = _loaded(words, lambda _: None, whole=False)
    values = to_plain(loaded.config)
    written = {} if resolves else _laid_over(compose(words).values, parse_overrides(words))
    for key, value in leaves(written):
        if "${" in repr(value):
            values = _merged(values, nested(key, value))
    values = _laid_over(values, [(key, REMOVED) for key in loaded.open])
    later = f"# chosen for the GPU when the run starts: {', '.join(loaded.open)}\n" if loaded.open else ""
    return OmegaConf.to_yaml(OmegaConf.create(values)) + later


def as_omegaconf(values: Mapping[str, Any]) -> DictConfig:
    """Values as files of other projects expect their settings."""
    return OmegaConf.create(dict(values))
