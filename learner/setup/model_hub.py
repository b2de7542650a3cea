"""Checkpoints named as on the model hub (`owner/name`): taken from its cache on this machine, or fetched once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from envs.data.hub import hub_answers
from streamrl.errors import ConfigError, RunNotFoundError
from streamrl.named_code import allow_words
from streamrl.processes import for_all
from streamrl.run_dirs import find_run_dir
from streamrl.stream.rebuilt import NAMED, named_version, rebuilt

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a checkpoint of ours may hold; a repository often has the weights a second time in other formats."""


def find_models(
    sections: Mapping[str, Any], notify: Callable[[str], None], *, allow: Iterable[str] = ()
) -> None:
    """Replace names of models of the hub, and versions of runs (RUN@N), by folders.

    Args:
        sections: that name a model, by the setting in which each does.
        allow: names of code that the run of a RUN@N may use.
    Raises:
        ConfigError: with the command that fetches one.
    """
    for setting, section in sections.items():
        key = setting.rpartition(".")[2]
        path = getattr(section, key)
        if path is not None and (named := _named(path, setting)) is not None:
            setattr(section, key, str(rebuilt(*named, allow_words(allow)).resolve()))
        elif path is not None and is_hub_name(path):
            setattr(section, key, _folder(path, setting, notify))


def _named(path: str, setting: str) -> tuple[Path, int] | None:
    """The run and version of RUN@N, for a run's name without runs/ too. Raises ConfigError: there is no such run."""
    if (named := named_version(path)) is not None or Path(path).exists() or not NAMED.fullmatch(path) or "://" in path:
        return named
    run, _, version = path.rpartition("@")
    try:
        return named_version(f"{find_run_dir(run)}@{version}")
    except RunNotFoundError as error:
        raise ConfigError(f"{setting}={path}: {error}") from error


def is_hub_name(name: str) -> bool:
    """Whether this is `owner/name` and no folder here; what begins with models/ or runs/ is meant to be one."""
    ours = (".", "/", "~", "models/", "runs/")
    return name.count("/") == 1 and "@" not in name and not name.startswith(ours) and not Path(name).exists()


def _folder(name: str, setting: str, notify: Callable[[str], None]) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    by_hand = f"hf download {name} --local-dir models/{Path(name).name}"
    try:
        cached = Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=True))
        if (cached / "config.json").exists() and any(cached.glob("*.safetensors")):
            return str(cached)
    except HFValidationError as error:
        raise ConfigError(
            f"{setting}={name} is no folder here (looked in {Path.cwd()}) and cannot be a name of the model hub: give "
            "either"
        ) from error
    except LocalEntryNotFoundError:
        pass
    if not hub_answers():
        raise ConfigError(
            f"{setting}={name} is no folder here and not in the cache of the model hub, which cannot be reached from "
            f"here: run {by_hand} on a machine that can, then give that folder."
        )
    notify(f"fetching {name} from {constants.ENDPOINT}")
    try:
        with for_all():
            return str(snapshot_download(name, allow_patterns=list(FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{setting}={name} could not be fetched: {reason} Check the name, or give a local folder: {by_hand}."
        ) from error
