"""`streamrl resume`: go on with a run by its directory alone."""

from __future__ import annotations

import os
import shlex

from streamrl.commands import parser_of, say
from streamrl.config.overrides import check_words
from streamrl.errors import ControlError
from streamrl.metrics.run_record import starts_of
from streamrl.named_code import is_own
from streamrl.parent_watch import program
from streamrl.run_dirs import has_learner
from streamrl.verbs.runs import NamedRun, find_run

SET_HERE = ("run.dir", "checkpoint.resume")
VERBS = ("launch", "learner", "sft", "dpo", "train-reward-model")
"""Commands that a run of somebody else may have been started with."""


def resume(words: list[str]) -> int:
    """Become the command that goes on with the run. Raises ControlError: no such run, or it runs."""
    parser = parser_of(
        "resume", "Continue a run from its newest good checkpoint with the command that last started it, "
        "streamrl launch or streamrl learner, in its run directory.", find=find_run,
    )
    parser.add_argument("words", nargs="*", default=[], metavar="key=value",
                        help="settings that replace those of the run, such as trainer.num_steps=400")
    given = parser.parse_args(words)
    run = given.run
    command = command_of(run, given.words)
    if not (run.path / "LATEST").exists():
        say(f"{run.name} has no checkpoint yet: it starts from version 0")
    say(shlex.join(["streamrl", *command]))
    line = [*program("streamrl.cli"), *command]
    os.execv(line[0], line)


def key_of(word: str) -> str:
    """The setting or group that a word is about."""
    return word.partition("=")[0].lstrip("+~")


def command_of(run: NamedRun, changes: list[str]) -> list[str]:
    """`launch` or `learner`, with the words of the run's last start and these changes.

    Raises:
        ControlError: it runs, it has reached its last step, or nothing says how it was started.
        ConfigError: it is not signed as a run of this user, and names what the changes do not allow.
    """
    if run.has_launcher or run.has_hub or has_learner(run.path):
        raise ControlError(f"{run.name} is running: see streamrl status {run.path}")
    line = next((str(one.get("command", "")) for one in reversed(starts_of(run.path))), "")
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is not closed: somebody has edited it
        words = []
    if len(words) < 2:
        raise ControlError(f"{run.path}/run.json does not say how the run was started: repeat that command with "
                           f"run.dir={run.path} checkpoint.resume=true")
    _, verb, *before = words
    changed = {key_of(word) for word in changes} | set(SET_HERE)
    removed = {key_of(word) for word in changes if word.startswith("~") and "." in key_of(word)}
    kept = [
        word for word in before
        if key_of(word) not in changed or (key_of(word) in removed and not word.startswith("~"))  # it takes that away
    ]
    ended = str(run.status.get("state", "")) == "finished"
    if ended and not changed & {"trainer.num_steps", "trainer.num_epochs"}:
        raise ControlError(
            f"{run.name} is over: it has done its {run.status.get('total_steps', 0)} steps. To train on, give more: "
            f"streamrl resume {run.path} trainer.num_steps=N"
        )
    if not is_own(run.path / "run.json"):
        if verb not in VERBS:
            raise ControlError(f"{run.path}/run.json has {verb!r} as the command, and is not signed as a run of yours: "
                               f"give the command yourself, with run.dir={run.path} checkpoint.resume=true")
        kept = check_words(kept, changes, str(run.path))
    return [verb, *kept, *changes, f"run.dir={run.path}", "checkpoint.resume=true"]
