"""`streamrl status`: who waits for whom, one sentence per process."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.commands import parser_of, say
from streamrl.errors import ControlError
from streamrl.messages.printable import printable
from streamrl.transport.control import ask
from streamrl.verbs.runs import NamedRun, find_run


def status(words: list[str]) -> int:
    """Print the state of a run; returns 0 whether it runs or is over."""
    run = parser_of(
        "status", "Say in one sentence each what the processes of a run do or wait for. Run it on the machine of "
        "the learner, as the user who started the run. Actors on other machines are listed too.", find=find_run,
    ).parse_args(words).run
    if not run.has_hub and not run.has_launcher:
        say(f"{run.name} is over: {run.how_it_ended()}")
        return 0
    told, head = _of_hub(run)
    told += _of_launcher(run, {name for name, _ in told})
    say(f"{run.name}: {head}")
    _print(told)
    return 0


def _of_hub(run: NamedRun) -> tuple[list[tuple[str, str]], str]:
    """The hub's report on itself, the learner and the actors, and the run's progress."""
    if not run.has_hub:
        return [], "starting"
    try:
        answer = ask(run.hub, "the hub", verb="status")
    except ControlError as error:
        if not run.has_launcher:
            raise
        return [("hub", f"does not answer: {error}")], "its hub is silent"
    steps = answer["version"] // answer["steps_per_batch"]
    head = f"step {steps} of {answer['total_steps']}, version {answer['version']}"
    return [(name, what) for name, what in answer["processes"]], head


def _of_launcher(run: NamedRun, known: set[str]) -> list[tuple[str, str]]:
    """The launcher, and what it knows of processes that the hub does not."""
    if not run.has_launcher:
        return [("launcher", "is none: learner and actors were started apart")]
    try:
        answer = ask(run.launcher, "streamrl launch", verb="status")
    except ControlError as error:
        return [("launcher", f"does not answer: {error}")]
    actors = answer["processes"]
    num = answer.get("will_keep") or len(actors)
    verb = "will keep" if answer.get("will_keep") else "keeps"
    mine = f"{verb} {num} actor{'s' * (num != 1)} alive (process {run.launcher['pid']})"
    learner = [] if any(name.startswith("learner") for name in known) else [("learner", answer["learner"])]
    return [*learner, ("launcher", mine), *((name, what) for name, what in actors if name not in known)]


def _print(told: Iterable[tuple[str, str]]) -> None:
    rows = list(told)
    width = max(len(name) for name, _ in rows)
    for name, what in rows:
        print(printable(f"  {name:<{width}}  {what}"))
