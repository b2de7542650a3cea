"""`streamrl resume`: go on with a run by its directory alone."""

from __future__ import annotations

import fcntl
import os
import shlex
from pathlib import Path

from streamrl.errors import ControlError
from streamrl.metrics.run_record import read_object
from streamrl.parent_watch import program
from streamrl.verbs.runs import NamedRun, find_run

USAGE = """streamrl resume RUN [key=value ...]    go on with a run from its newest good checkpoint

  RUN          a run directory, or its name in runs/
  key=value    settings that replace those of the run, such as trainer.num_steps=400

It repeats the command that the run was last started with, streamrl launch or streamrl learner, in its run directory."""
SET_HERE = ("run.dir", "checkpoint.resume")


def resume(words: list[str]) -> int:
    """Become the command that goes on with the run. Raises ControlError: no such run, or it runs."""
    if not words or "=" in words[0]:
        raise ControlError(f"expected RUN, got {words[0] if words else 'nothing'}\n\n{USAGE}")
    run = find_run(words[0])
    command = command_of(run, words[1:])
    if not (run.path / "LATEST").exists():
        print(f"{run.name} has no checkpoint yet: it starts from version 0")
    print(shlex.join(["streamrl", *command]), flush=True)
    line = [*program("streamrl.cli"), *command]
    os.execv(line[0], line)


def command_of(run: NamedRun, changes: list[str]) -> list[str]:
    """`launch` or `learner`, with the words of the run's last start and these changes.

    Raises ControlError: it runs, it has reached its last step, or nothing says how it was started.
    """
    if run.has_launcher or run.has_hub or _is_locked(run.path):
        raise ControlError(f"{run.name} is running: see streamrl status {run.path}")
    starts = read_object(run.path / "run.json").get("starts", ())
    if not starts:
        raise ControlError(f"{run.path}/run.json does not say how the run was started: repeat that command with "
                           f"run.dir={run.path} checkpoint.resume=true")
    _, verb, *before = shlex.split(starts[-1]["command"])
    changed = {word.partition("=")[0].lstrip("+~") for word in changes} | set(SET_HERE)
    kept = [word for word in before if word.partition("=")[0].lstrip("+~") not in changed]
    ended = str(run.status.get("state", "")) == "finished"
    if ended and not changed & {"trainer.num_steps", "trainer.num_epochs"}:
        raise ControlError(
            f"{run.name} is over: it has done its {run.status.get('total_steps', 0)} steps. To train on, give more: "
            f"streamrl resume {run.path} trainer.num_steps=N"
        )
    return [verb, *kept, *changes, f"run.dir={run.path}", "checkpoint.resume=true"]


def _is_locked(path: Path) -> bool:
    """Whether a learner holds the run's lock."""
    try:
        with open(path / "LOCK", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
