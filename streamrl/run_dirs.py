"""Run directories: `<root>/<name>-<number>`, or the one that `run.dir` names; and the note of how a run was started."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from streamrl.config.schema import Config
from streamrl.errors import ConfigError
from streamrl.metrics.run_record import read_object
from streamrl.metrics.sinks import write_atomic
from streamrl.version import __version__

RUNS = Path("runs")
"""Where commands look for a run by its name."""


def name_or_path(run_dir: Path) -> str:
    """What to call a run on the command line and in Python: its name, if it is found by that."""
    is_known = (RUNS / run_dir.name).resolve() == run_dir.resolve()
    return run_dir.name if is_known else str(run_dir)


def choose_run_dir(config: Config) -> Path:
    """The directory of this run: `run.dir`, the newest of this name to resume, or a new one with the next number.

    Raises:
        ConfigError: nothing to resume, or `run.dir` already holds a run and resuming was not asked for.
    """
    run, resume = config.run, config.checkpoint.resume
    if run.dir is not None:
        run_dir = Path(run.dir)
        if (run_dir / "EPOCH").exists() and not resume:  # a learner has started here
            raise ConfigError(
                f"run.dir={run_dir} already holds a run: add checkpoint.resume=true to continue it, or choose another"
            )
        return run_dir
    tails = [path.name.removeprefix(f"{run.name}-") for path in Path(run.root).glob(f"{run.name}-*")]
    newest = max((int(tail) for tail in tails if tail.isdigit()), default=0)
    if resume and not newest:
        raise ConfigError(
            f"checkpoint.resume=true, but there is no run {run.name}-* in {run.root}/: "
            "start one without it, or name its directory with run.dir=..."
        )
    while not resume:  # another process may take a number between listing and mkdir: only mkdir is atomic
        newest += 1
        try:
            numbered_run_dir(config, newest).mkdir(parents=True)
            break
        except FileExistsError:
            continue
    return numbered_run_dir(config, newest)


def numbered_run_dir(config: Config, number: int) -> Path:
    return Path(config.run.root) / f"{config.run.name}-{number:03d}"


def note_start(run_dir: Path, command: Sequence[str]) -> None:
    """Add a start to `run.json`: the command line, the time, the version, and the commit of the working directory."""
    path = run_dir / "run.json"
    started = {
        "command": shlex.join(command), "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": __version__, "commit": _commit(),
    }
    starts = [*read_object(path).get("starts", ()), started]
    write_atomic(path, json.dumps({"starts": starts}, indent=1) + "\n")


def _commit() -> str:
    """`1a2b3c4`, with a + if files were changed since; "" outside a git repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty=+"], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
