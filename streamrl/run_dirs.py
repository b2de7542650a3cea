"""Run directories: `<root>/<name>-<number>`, or the one that `run.dir` names; and the note of how a run was started."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from streamrl.config.schema import Config
from streamrl.errors import ConfigError, RunLockedError, RunNotFoundError, one_sentence
from streamrl.metrics.files import read_object, write_atomic
from streamrl.metrics.run_record import FAILURE, starts_of
from streamrl.named_code import sign
from streamrl.version import __version__

RUNS = Path("runs")
"""Where commands look for a run by its name."""
LAUNCH_NOTE = "launch.json"
"""In the run directory while `streamrl launch` runs: where `streamrl scale` asks."""
LAUNCH_LOCK, SWEEP_LOCK = "LAUNCH_LOCK", "SWEEP_LOCK"
MARKS = ("EPOCH", "run.json", LAUNCH_NOTE, "metrics.jsonl", FAILURE)
"""Files that only a run directory has."""
MAX_NAMED = 8
LEARNER_ENDS_S = 15.0


def name_or_path(run_dir: Path) -> str:
    """The word for a run on the command line and in Python: its name if it is found by that, else its path."""
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
            f"checkpoint.resume=true, but no run {run.name}-* is in {run.root}/: "
            "start one without it, or name its directory with run.dir=..."
        )
    while not resume:  # another process may take a number between listing and mkdir: only mkdir is atomic
        newest += 1
        try:
            numbered_run_dir(config, newest).mkdir(mode=0o700, parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"run.root={run.root}: choose another one: {one_sentence(error)}") from error
    return numbered_run_dir(config, newest)


def numbered_run_dir(config: Config, number: int) -> Path:
    return Path(config.run.root) / f"{config.run.name}-{number:03d}"


def find_run_dir(word: str | os.PathLike[str], root: Path = RUNS) -> Path:
    """The directory that is named, or the run of this name in `runs/`. Raises RunNotFoundError if neither is a run."""
    for path in (Path(word), root / word):
        if any((path / mark).exists() for mark in MARKS):
            return path
    here = sorted(path.parent.name for path in root.glob("*/run.json"))
    known = f"{root}/ has {', '.join(here[-MAX_NAMED:])}" if here else f"{root}/ has no runs"
    raise RunNotFoundError(
        f"no such run: {os.fspath(word)!r} is no run directory; name one, such as runs/quickstart-001. {known}."
    )


@contextmanager
def sweep_lock(directory: Path) -> Iterator[None]:
    """Hold the sweep in this directory for this process alone. Raises RunLockedError: another process has it."""
    with open(directory / SWEEP_LOCK, "ab", buffering=0) as lock:
        if not _is_free(lock, fcntl.LOCK_EX):
            raise RunLockedError(
                f"sweep.dir={directory} belongs to a sweep in progress: let it end or stop it first, or choose another "
                "directory"
            )
        yield


@contextmanager
def launch_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run in this directory, which is made, for this launcher alone; no learner has it either.

    Raises:
        RunLockedError: another process has the run.
        ConfigError: the directory cannot be made or written.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(run_dir / LAUNCH_LOCK, "ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir}: choose another one: {one_sentence(error)}") from error
    with lock:
        deadline = time.monotonic() + LEARNER_ENDS_S
        while not (free := _is_free(lock, fcntl.LOCK_EX)) or has_learner(run_dir):
            if not free or time.monotonic() > deadline:
                raise RunLockedError(
                    f"{run_dir} belongs to a run in progress: see streamrl status {run_dir}; stop it first, or choose "
                    "another run.dir"
                )
            time.sleep(0.1)  # the learner of a launcher that was killed saves and ends
        yield


def has_learner(run_dir: Path) -> bool:
    """Whether a learner holds the run's lock."""
    return is_held(run_dir / "LOCK")


def is_held(path: Path) -> bool:
    """True if a process holds this lock."""
    try:
        with open(path, "rb") as lock:
            return not _is_free(lock, fcntl.LOCK_SH)
    except OSError:
        return False


def _is_free(lock: IO[bytes], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def note_start(run_dir: Path, command: Sequence[str]) -> None:
    """Add a start to `run.json`: the command line, the time, the version, and the commit of the working directory.

    A run that had finished is starting from here on: what this start was asked for stands, however early it is killed.
    So is one that had failed in a sweep, which is no longer the sweep's last word on it.
    """
    (run_dir / FAILURE).unlink(missing_ok=True)
    started = {
        "command": shlex.join(command), "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": __version__, "commit": _commit(),
    }
    _write_starts(run_dir, [*starts_of(run_dir), started])
    status = read_object(run_dir / "status.json")
    if status.get("state") == "finished":
        write_atomic(run_dir / "status.json", json.dumps({**status, "state": "starting"}))


def settings_written(run_dir: Path) -> int:
    """The time at which a learner last wrote the run's settings, which it does once it has taken them; 0: none has."""
    path = run_dir / "config.yaml"
    return path.stat().st_mtime_ns if path.exists() else 0


def forget_refused(run_dir: Path, before: int) -> None:
    """Take the last start back if the learner of a begun run refused it: `streamrl resume` would repeat its words.

    Args:
        before: `settings_written` before that start.
    """
    starts = starts_of(run_dir)
    if before and before == settings_written(run_dir) and len(starts) > 1:
        _write_starts(run_dir, starts[:-1])


def _write_starts(run_dir: Path, starts: Sequence[Mapping[str, str]]) -> None:
    path = run_dir / "run.json"
    write_atomic(path, json.dumps({"starts": starts}, indent=1) + "\n")
    sign(path)


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
