"""Options and words of Hydra's own: each under the name that it has here, or refused with the setting that does it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from streamrl.config.composition import CONFIGS, PRIMARY, SEARCH_PATH
from streamrl.errors import ConfigError

RUNS = {"hydra.run.dir": "run.dir", "hydra.job.name": "run.name"}
SWEEPS = {
    "hydra/sweeper": "sweep.sampler",
    "hydra/sweeper/sampler": "sweep.sampler",
    "hydra.sweep.dir": "sweep.dir",
    "hydra.sweep.subdir": "sweep.subdir",
    "hydra.sweeper.n_trials": "sweep.num_trials",
    "hydra.sweeper.direction": "sweep.direction",
    "hydra.sweeper.n_jobs": "sweep.num_parallel",
    "hydra.sweeper.sampler.n_startup_trials": "sweep.num_startup_trials",
    "hydra.launcher.n_jobs": "sweep.num_parallel",
    "hydra.launcher.array_parallelism": "sweep.num_parallel",
}
"""Names of our settings in Hydra, its Optuna sweeper and its launchers."""
LAUNCHER = "hydra.launcher."
"""Prefix of words that name a parameter of submitit."""
PARAMS = "hydra.sweeper.params."
"""What follows is the setting that varies."""
SPACE = "search="
"""A file of configs/search/, or of a directory of one's own: settings to vary, under hydra.sweeper.params."""
SAMPLERS = {"optuna": "tpe", "basic": "grid"}
MEANT = {
    "hydra/launcher": "sweep.num_parallel for several runs at once here, hydra/launcher=submitit_slurm for Slurm",
    "hydra.launcher.submitit_folder": "sweep.dir",
    "hydra.launcher": "hydra/launcher=submitit_slurm, submitit_local or joblib, and its parameters one by one",
    "hydra.sweeper.max_batch_size": "sweep.num_parallel",
    "hydra.sweeper.sampler": "sweep.sampler and run.seed",
    "hydra.sweeper.study_name": "sweep.dir",
    "hydra.sweeper.storage": "sweep.dir",
    "hydra.mode": "-m",
    "hydra.verbose": "STREAMRL_LOG",
    "hydra.job_logging": "STREAMRL_LOG",
    "hydra/job_logging": "STREAMRL_LOG",
    "hydra/hydra_logging": "STREAMRL_LOG",
    "hydra.output_subdir": "run.dir",
    "hydra.job.chdir": "run.dir: a run stays where it was started",
}
"""The counterpart of words that are not taken."""
OPTIONS = {
    "--info": "--cfg job",
    "-i": "--cfg job",
    "--package": "--cfg job, which prints all settings",
    "-p": "--cfg job, which prints all settings",
    "--hydra-help": "--help",
    "--version": "streamrl --version",
    "--shell-completion": "streamrl settings WORD",
    "-sc": "streamrl settings WORD",
    "--experimental-rerun": "streamrl resume RUN",
}
"""Options that are not taken, and what there is."""


@dataclass(frozen=True)
class CommandLine:
    """A command line: settings and files as `words`, and what is to be done with them.

    Attributes:
        shows: print the composed settings, and run nothing.
        resolves: references in them are printed as their values.
    """

    words: list[str]
    multirun: bool = False
    shows: bool = False
    resolves: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: write --cfg job, --config-dir DIRECTORY or --config-name NAME")


def read_command_line(typed: Sequence[str]) -> CommandLine:
    """The words of a command with settings, Hydra's own among them under our names.

    Raises ConfigError: an option or a word of Hydra that does nothing here.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (("--multirun", "-m"), ("--run", "-r"), ("--resolve",)):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    given, words = parser.parse_known_args(list(typed))
    if (option := next((word for word in words if word.partition("=")[0] in OPTIONS), None)) is not None:
        raise ConfigError(f"`{option}` is not an option here: take {OPTIONS[option.partition('=')[0]]}")
    if given.config_dir is not None:
        quoted = given.config_dir.replace("'", "\\'")
        words.append(f"{SEARCH_PATH}['{quoted}']")
    if given.config_name not in (None, PRIMARY):
        words.append(_file_of(given.config_name, given.config_dir))
    multirun = given.multirun or "hydra.mode=MULTIRUN" in words
    words = own_words([word for word in words if word not in ("hydra.mode=MULTIRUN", "hydra.mode=RUN")])
    sweeps = next((word for word in words if word.startswith(("sweep.", SPACE))), None)
    if sweeps is not None and not multirun:
        raise ConfigError(f"`{sweeps}` is of a sweep: use it with streamrl launch -m, or leave it out")
    return CommandLine(words, multirun, given.cfg is not None, given.resolve)


def _file_of(name: str, directory: str | None) -> str:
    """The settings file that --config-name means. Raises ConfigError: there is none."""
    places = [Path(directory or "."), CONFIGS]
    for place in places:
        if (file := place / f"{name.removesuffix('.yaml')}.yaml").is_file():
            return str(file)
    raise ConfigError(f"--config-name {name}: no such file in {places[0]}: give its directory by --config-dir")


def own_words(words: Sequence[str]) -> list[str]:
    """The words with our names in place of Hydra's. Raises ConfigError: one does nothing here."""
    parallel = any(word.startswith(("hydra.launcher.n_jobs=", "hydra.sweeper.n_jobs=", "sweep.num_parallel="))
                   for word in words)
    found = []
    for word in words:
        key, _, value = word.partition("=")
        name = key.lstrip("+~")
        if not name.startswith(("hydra.", "hydra/")) or word.startswith(SEARCH_PATH):
            found.append(word)
        elif word.startswith("~"):
            refuse(name)
        elif name.startswith(PARAMS):
            found.append(f"{name.removeprefix(PARAMS)}={value.strip(chr(39) + chr(34))}")
        elif name == "hydra.sweep.subdir":
            text = value.replace("${hydra.job.num}", "{num}").replace("${hydra.job.override_dirname}", "{overrides}")
            found.append(f"sweep.subdir='{text}'")
        elif name == "hydra/launcher" and (value == "basic" or (value == "joblib" and parallel)):
            continue
        elif name == "hydra/launcher" and value in ("submitit_slurm", "submitit_local"):
            found.append(f"sweep.launcher={value}")
        elif name == "hydra/launcher" and value == "joblib":
            raise ConfigError("hydra/launcher=joblib runs several at once: say how many, with hydra.launcher.n_jobs=2")
        elif (ours := {**RUNS, **SWEEPS}.get(name)) is not None:
            found.append(f"{ours}={SAMPLERS.get(value, value) if name == 'hydra/sweeper' else value}")
        elif name.startswith(LAUNCHER) and name not in MEANT:
            found.append(f"sweep.launcher_options.{name.removeprefix(LAUNCHER)}={value}")
        else:
            refuse(name)
    return found


def refuse(key: str) -> NoReturn:
    """Refuse a word of Hydra's own, which would change nothing."""
    if key in SWEEPS:
        raise ConfigError(f"`{key}` is of a sweep: streamrl launch -m ..., or there as {SWEEPS[key]}=VALUE.")
    meant = next((ours for name, ours in {**RUNS, **MEANT}.items() if f"{key}/".startswith((f"{name}/", f"{name}."))),
                 "a setting of `streamrl settings run` or `streamrl settings sweep`")
    raise ConfigError(f"`{key}` is not used here, where Hydra composes settings and reads words: take {meant}.")
