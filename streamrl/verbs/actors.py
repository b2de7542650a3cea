"""`streamrl drain` and `streamrl scale`: fewer or more actors, while the run goes on."""

from __future__ import annotations

from streamrl.commands import parser_of, say
from streamrl.errors import ControlError
from streamrl.metrics.files import read_object
from streamrl.transport.control import MOST_FINISH_S, ask
from streamrl.verbs.runs import find_run

FINISH_S = 60.0


def drain(words: list[str]) -> int:
    """Ask the hub to drain one actor."""
    parser = parser_of(
        "drain", "Let an actor finish its leases and leave. Nothing that it has generated is lost. `streamrl launch` "
        "does not start it again; `streamrl scale` may.", find=find_run,
    )
    parser.add_argument("actor", metavar="ACTOR", help="its name, as in streamrl status RUN")
    parser.add_argument("--within", type=float, default=FINISH_S, metavar="SECONDS",
                        help=f"{FINISH_S:g} by default; unfinished work then goes to other actors")
    given = parser.parse_args(words)
    if not 0.0 <= given.within <= MOST_FINISH_S:
        parser.error(f"--within {given.within:g}: give a number of seconds from 0 to {MOST_FINISH_S:g}")
    hub = given.run.require_hub()
    num = ask(hub, "the hub", verb="drain", actor=given.actor, within_s=given.within)["num_leases"]
    finishes = f"finishes {num} lease{'s' * (num != 1)} within {given.within:g} s, takes no more"
    say(f"{given.actor} {finishes if num else 'has no leases'} and leaves")
    return 0


def scale(words: list[str]) -> int:
    """Ask the launcher for another number of actors."""
    parser = parser_of(
        "scale", "Let the launcher of a run keep N actors alive. Actors that were started by hand are not counted: "
        "stop them with streamrl drain, or by Ctrl-C.", find=find_run,
    )
    parser.add_argument("number", metavar="N", type=int, help="0 or more; surplus actors finish their leases first, "
                        "and a run without actors waits for new ones")
    given = parser.parse_args(words)
    run = given.run
    if not run.has_launcher:
        run.require_hub()  # it is over: that is the better error
        connect = read_object(run.path / "hub.json").get("connect", "tcp://HOST:PORT")
        raise ControlError(
            f"{run.name} has no launcher that could start actors: start one with  streamrl actor connect={connect}  "
            f"and end one with  streamrl drain {run.path} ACTOR"
        )
    answer = ask(run.launcher, "streamrl launch", timeout_s=30.0, verb="scale", num_actors=given.number)
    for verb, names in (("started", answer["started"]), ("finish and leave", answer["leaving"])):
        if names:
            say(f"{verb}: {', '.join(names)}")
    if not answer["started"] and not answer["leaving"]:
        print(f"{run.name} has {given.number} actors already")
    return 0
