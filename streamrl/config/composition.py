"""Config groups as Hydra composes them: those of configs/, those of one's own directories, and defaults lists.

The result is nested plain values; Hydra sees neither the schema nor the words that set values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from streamrl.errors import ConfigError, in_one_line
from streamrl.extension import did_you_mean

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""Found by its path: in a user's script a folder `configs` of the user's comes first on the import path."""
PRIMARY = "config"
"""The file of configs/ whose defaults list names a recipe and no experiment."""
OWN_PRIMARY = "streamrl_settings_file"
SEARCH_PATH = "hydra.searchpath="


@dataclass(frozen=True)
class Composed:
    """Nested values of configs/, and the file that was chosen in each group: by a word, or by a file that was.

    Attributes:
        asked: groups in which a word, or a settings file with a defaults list, chose, and not an experiment.
    """

    values: dict[str, Any]
    chosen: dict[str, Any]
    directories: tuple[str, ...]
    asked: frozenset[str]

    def of_group(self, group: str) -> dict[str, Any]:
        """The values in the file that was chosen in a group, as it has them; none if none was asked for."""
        name = self.chosen.get(group)
        return group_values(group, name, self.directories) if isinstance(name, str) else {}


def is_file(word: str) -> bool:
    """Whether a word of the command line names a settings file."""
    return "=" not in word and word.endswith((".yaml", ".yml"))


def directories_of(words: Iterable[str]) -> tuple[str, ...]:
    """The directories with config groups that words name: a search path, and the place of a file with a defaults list.

    Raises ConfigError: there is no such directory.
    """
    found: list[str] = []
    for word in words:
        if word.startswith(SEARCH_PATH):
            try:
                named = OverridesParser.create().parse_override(word).value()
            except HydraException as error:
                raise ConfigError(f"`{word}` cannot be read: write {SEARCH_PATH}['DIRECTORY']") from error
            found += [str(one).removeprefix("file://") for one in (named if isinstance(named, list) else [named])]
        elif is_file(word):
            found.append(str(Path(word).parent))
    for one in found:
        if not Path(one).is_dir():
            raise ConfigError(f"{one}: no such directory in {Path.cwd()}: give one that holds settings")
    return tuple(dict.fromkeys(str(Path(one).resolve()) for one in found))


def is_choice(word: str, directories: tuple[str, ...]) -> bool:
    """Whether a word is Hydra's: a file of a config group, a search path, or a file with a defaults list."""
    key = word.partition("=")[0].lstrip("+~").partition("@")[0]
    return is_file(word) or word.startswith(SEARCH_PATH) or key in _groups(directories)


def group_files(group: str, directories: tuple[str, ...] = ()) -> list[str]:
    """The names in a config group."""
    return loader_of(directories).get_group_options(group)


def check_choice(group: str, chosen: Any, directories: tuple[str, ...]) -> None:
    """Raise ConfigError for a file that is not in its group: ../../name would be read from anywhere."""
    names = group_files(group, directories)
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if str(name) not in names:
            refuse_choice(group, str(name), names)


def refuse_choice(group: str, name: str, names: Sequence[str]) -> NoReturn:
    """A file that its group does not have."""
    raise ConfigError(
        f"{group}={name} is unknown.{did_you_mean(name, names)} Choose from {', '.join(sorted(names))}; a settings "
        "file of your own goes without a key: streamrl launch my.yaml."
    )


def group_values(group: str, name: str, directories: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values in a file of a config group."""
    found = loader_of(directories).repository.load_config(f"{group}/{name}")
    return OmegaConf.to_container(found.config) if found is not None else {}


def hydra_words_in(values: dict[str, Any]) -> list[str]:
    """Take Hydra's own section and choices out of the values of a settings file; returns them as words."""
    found, left = [], []
    for one in values.get("defaults", ()):
        [(key, name)] = one.items() if isinstance(one, Mapping) and len(one) == 1 else [(str(one), None)]
        group = str(key).removeprefix("override ").strip().removeprefix("/")
        if group.startswith("hydra/"):
            found.append(f"{group}={name}")
        else:
            left.append(one)
    if found:
        values["defaults"] = left
    return [*found, *_words(values.pop("hydra", {}), "hydra")]


def _words(value: Any, key: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{key}={value}"]
    return [word for name, one in value.items() for word in _words(one, f"{key}.{name}")]


def compose(words: Sequence[str]) -> Composed:
    """The configuration that choices among the words ask for.

    Raises ConfigError: a file that is not there, or a defaults list that Hydra does not compose.
    """
    directories = directories_of(words)
    choices = tuple(word for word in words if is_choice(word, directories))
    files = [word for word in choices if is_file(word)]
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)} both have a defaults list: name one of them in that of the other")
    typed = tuple(word for word in choices if not is_file(word) and not word.startswith(SEARCH_PATH))
    return deepcopy(_composed(typed, directories, Path(files[0]).read_text() if files else None))


@cache  # files take most of its time
def _composed(choices: tuple[str, ...], directories: tuple[str, ...], own: str | None) -> Composed:
    try:
        if own is not None:
            values = OmegaConf.to_container(OmegaConf.create(own))
            hydra_words_in(values)
            ConfigStore.instance().store(OWN_PRIMARY, OmegaConf.create(values))
        primary = PRIMARY if own is None else OWN_PRIMARY
        found = loader_of(directories).load_configuration(primary, [*choices, "hydra.job.name=streamrl"], RunMode.RUN)
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        refuse_choice(group, name, error.options or ())
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(in_one_line(error).replace(OWN_PRIMARY, "the settings file")) from error
    picked = found.hydra.runtime.choices
    asked = frozenset(word.partition("=")[0].lstrip("+~") for word in choices) if own is None else frozenset(picked)
    usual = {group: name for one in OmegaConf.load(CONFIGS / f"{PRIMARY}.yaml").defaults if isinstance(one, Mapping)
             for group, name in one.items()}
    chosen = {str(group): name for group, name in picked.items() if group in asked or name != usual.get(group, name)}
    values = OmegaConf.to_container(OmegaConf.masked_copy(found, [key for key in found if key != "hydra"]))
    return Composed(values, chosen, directories, asked)


@cache
def loader_of(directories: tuple[str, ...] = ()) -> ConfigLoaderImpl:
    """Hydra's loader of configs/ and of these directories."""
    setup_globals()  # its resolvers, such as ${now:%H}
    search = create_config_search_path(str(CONFIGS))
    for one in directories:
        search.prepend("own", one, "schema")  # that has to be the last
    return ConfigLoaderImpl(search)


@cache
def _groups(directories: tuple[str, ...]) -> frozenset[str]:
    return frozenset(loader_of(directories).list_groups("")) - {"hydra"}
