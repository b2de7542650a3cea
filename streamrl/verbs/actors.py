"""`streamrl drain` and `streamrl scale`: fewer or more actors, while the run goes on."""

from __future__ import annotations

from streamrl.errors import ControlError
from streamrl.metrics.files import read_object
from streamrl.transport.control import ask
from streamrl.verbs.runs import find_run
from streamrl.verbs.words import arguments, taken

DRAIN_USAGE = """streamrl drain RUN ACTOR [--within SECONDS]    let an actor finish its leases and leave

  RUN       a run directory, or its name in runs/
  ACTOR     its name, as in streamrl status RUN
  --within  60 by default; what is not finished by then goes to other actors

Nothing that it has generated is lost. `streamrl launch` does not start it again; `streamrl scale` may."""
SCALE_USAGE = """streamrl scale RUN N    let the launcher of a run keep N actors alive

  RUN    a run directory, or its name in runs/
  N      0 or more; surplus actors finish their leases first, and a run without actors waits for new ones

Actors that were started by hand are not counted: stop them with streamrl drain, or by Ctrl-C."""
FINISH_S = 60.0


def drain(words: list[str]) -> int:
    """Ask the hub to drain one actor."""
    words, within_s = taken(words, "--within", FINISH_S)
    word, actor = arguments(words, DRAIN_USAGE, "RUN", "ACTOR")
    run = find_run(word)
    answer = ask(run.require_hub(), "the hub", verb="drain", actor=actor, within_s=within_s)
    num = answer["num_leases"]
    finishes = f"finishes {num} lease{'s' * (num != 1)} within {within_s:g} s, takes no more"
    print(f"{actor} {finishes if num else 'has no leases'} and leaves")
    return 0


def scale(words: list[str]) -> int:
    """Ask the launcher for another number of actors."""
    word, number = arguments(words, SCALE_USAGE, "RUN", "N")
    if not number.isdigit():
        raise ControlError(f"expected a number of actors, got {number!r}\n\n{SCALE_USAGE}")
    run = find_run(word)
    if not run.has_launcher:
        run.require_hub()  # it is over: that is the better error
        connect = read_object(run.path / "hub.json").get("connect", "tcp://HOST:PORT")
        raise ControlError(
            f"{run.name} has no launcher that could start actors: start one with  streamrl actor connect={connect}  "
            f"and end one with  streamrl drain {run.path} ACTOR"
        )
    answer = ask(run.launcher, "streamrl launch", timeout_s=30.0, verb="scale", num_actors=int(number))
    for verb, names in (("started", answer["started"]), ("finish and leave", answer["leaving"])):
        if names:
            print(f"{verb}: {', '.join(names)}")
    if not answer["started"] and not answer["leaving"]:
        print(f"{run.name} has {number} actors already")
    return 0
