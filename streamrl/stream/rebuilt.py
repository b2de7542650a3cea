"""Versions of a run that no checkpoint holds: `RUN@137`, rebuilt by a learner that trains the log again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.metrics.files import read_object, text_of
from streamrl.parent_watch import program

NAMED = re.compile(r"(.+)@(\d+)")
"""A version of a run: runs/quickstart-001@40."""
FOLDER = "versions"
"""In the run directory: a Hugging Face checkpoint for each version that was asked for."""
NOTE = "replayed.json"
"""In such a folder: how its weights compare with those of the run, and at which start of the run it was made."""
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def named_version(name: str) -> tuple[Path, int] | None:
    """The run directory and the version of a `RUN@N`; None if it is none."""
    found = None if Path(name).exists() else NAMED.fullmatch(name)
    if found is None or not (Path(found[1]) / "config.yaml").exists():
        return None
    return Path(found[1]), int(found[2])


def starts_of(run_dir: Path) -> str:
    """Changes whenever the run is started again: what it was at a version may have been another history."""
    return text_of(run_dir / "EPOCH").strip()


def cached(run_dir: Path, version: int) -> Path | None:
    """The folder of a version that was rebuilt since the run's last start."""
    folder = run_dir / FOLDER / str(version)
    note = read_object(folder / NOTE)
    return folder if note and note.get("starts") == starts_of(run_dir) else None


def rebuilt(run_dir: Path, version: int) -> Path:
    """The folder of a version; a process of its own rebuilds it first if need be, and shows how far it is.

    Raises ConfigError: it cannot be rebuilt; that process has said why.
    """
    if (folder := cached(run_dir, version)) is None:
        command = [*program("learner.replay.at"), f"{run_dir}@{version}"]
        env = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env, check=False)
        folder = cached(run_dir, version)
        if done.returncode or folder is None:
            raise ConfigError(
                f"version {version} of {run_dir} could not be rebuilt from its log: see above, or try it alone with "
                f"streamrl at {run_dir}@{version}"
            )
    if read_object(folder / NOTE).get("compared") != "equal":
        print(f"{folder}: {read_object(folder / NOTE).get('compared')}", file=sys.stderr)
    return folder
