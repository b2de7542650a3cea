"""`streamrl resume`: go on with a run by its directory alone."""

from __future__ import annotations

import os
import shlex

from streamrl.commands import parser_of
from streamrl.errors import ControlError
from streamrl.metrics.run_record import starts_of
from streamrl.parent_watch import program
from streamrl.run_dirs import has_learner
from streamrl.verbs.runs import NamedRun, find_run

SET_HERE = ("run.dir", "checkpoint.resume")


def resume(words: list[str]) -> int:
    """Become the command that goes on with the run. Raises ControlError: no such run, or it runs."""
    parser = parser_of(
        "resume", "Go on with a run from its newest good checkpoint, by the command that it was last started with, "
        "streamrl launch or streamrl learner, in its run directory.", find=find_run,
    )
    parser.add_argument("words", nargs="*", metavar="key=value",
                        help="settings that replace those of the run, such as trainer.num_steps=400")
    given = parser.parse_args(words)
    run = given.run
    command = command_of(run, given.words)
    if not (run.path / "LATEST").exists():
        print(f"{run.name} has no checkpoint yet: it starts from version 0")
    print(shlex.join(["streamrl", *command]), flush=True)
    line = [*program("streamrl.cli"), *command]
    os.execv(line[0], line)


def command_of(run: NamedRun, changes: list[str]) -> list[str]:
    """`launch` or `learner`, with the words of the run's last start and these changes.

    Raises ControlError: it runs, it has reached its last step, or nothing says how it was started.
    """
    if run.has_launcher or run.has_hub or has_learner(run.path):
        raise ControlError(f"{run.name} is running: see streamrl status {run.path}")
    words = next((shlex.split(str(one.get("command", ""))) for one in reversed(starts_of(run.path))), [])
    if len(words) < 2:
        raise ControlError(f"{run.path}/run.json does not say how the run was started: repeat that command with "
                           f"run.dir={run.path} checkpoint.resume=true")
    _, verb, *before = words
    changed = {word.partition("=")[0].lstrip("+~") for word in changes} | set(SET_HERE)
    kept = [word for word in before if word.partition("=")[0].lstrip("+~") not in changed]
    ended = str(run.status.get("state", "")) == "finished"
    if ended and not changed & {"trainer.num_steps", "trainer.num_epochs"}:
        raise ControlError(
            f"{run.name} is over: it has done its {run.status.get('total_steps', 0)} steps. To train on, give more: "
            f"streamrl resume {run.path} trainer.num_steps=N"
        )
    return [verb, *kept, *changes, f"run.dir={run.path}", "checkpoint.resume=true"]
