"""The actors of `streamrl launch`: kept alive, and as many as `streamrl scale` asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from streamrl.config.load import to_plain
from streamrl.config.schema import Config
from streamrl.errors import ControlError, one_sentence
from streamrl.named_code import words_for_actors
from streamrl.supervise.caller import Caller
from streamrl.supervise.child import OWN_LINE, Supervised, last_words, log_tail
from streamrl.transport.keys import KeyDirectory

log = logging.getLogger("streamrl.launch")

QUICK_DEATH_S = 15.0
HEALTHY_S = 120.0
NUM_SAME_DEATHS = 3
"""An actor that ends so often in a row with the same words, and soon after its start, will not do better."""
EXIT_CONFIG, EXIT_NO_ACTORS = 2, 3
FINISH_S = 60.0
"""How long an actor that is no longer wanted may take to finish its leases."""
LEAVE_S = 15.0
"""And then to hand the rest back."""
START_AGAIN_S = 10.0


@dataclass(slots=True)
class Leaving:
    """An actor that is no longer wanted."""

    child: Supervised
    terminate_at: float


def actor_words(config: Config, name: str) -> list[str]:
    """The words that an actor of a launched run gets beside the hub's address: what it needs before it has joined."""
    actors = config.actors
    return [
        f"actors.actor_id={name}",
        f"actors.engine={actors.engine}",  # HELLO reports it
        f"actors.transports=[{','.join(actors.transports)}]",
        f"actors.give_up_after_s={actors.give_up_after_s}",
        *([f"actors.key={KeyDirectory(keys).launched_key()}"] if (keys := config.hub.keys) else []),
        *([f"actors.device={actors.device}"] if actors.device != "auto" else []),
        *words_for_actors(to_plain(config)),
    ]


class ActorPool:
    """Starts, restarts and retires; `poll` does what is due.

    Args:
        start: an actor of this name.
        drain: asks the hub to let an actor of this name finish and leave, within so many seconds; False if it cannot.
        num_max_restarts: see `launch.num_max_restarts`.
        caller: is told of actors that are given up.
    """

    def __init__(
        self, start: Callable[[str], Supervised], drain: Callable[[str, float], bool], num_max_restarts: int,
        caller: Caller,
    ) -> None:
        self._caller = caller
        self._start, self._drain, self._num_max_restarts = start, drain, num_max_restarts
        self._actors: list[Supervised] = []
        self._leaving: list[Leaving] = []
        self._some_left = False

    @property
    def children(self) -> list[Supervised]:
        """Every process that may still run."""
        return [*self._actors, *(one.child for one in self._leaving)]

    @property
    def all_given_up(self) -> bool:
        """Whether every actor was given up; one that has left in peace is no sign of trouble."""
        return bool(self._actors) and not self._some_left and all(actor.given_up for actor in self._actors)

    def scale(self, num: int, now: float) -> tuple[list[str], list[str]]:
        """Start or retire actors until `num` are there or on their way; returns the names of both kinds.

        Raises ControlError: this machine can start no more; those that were started are kept.
        """
        wanted = [actor for actor in self._actors if not actor.given_up and not self._has_left(actor)]
        surplus = wanted[num:]
        for actor in surplus:
            self._actors.remove(actor)
            self._retire(actor, now)
        taken = {child.name for child in self.children}
        free = (name for index in count() if (name := f"actor-{index}") not in taken)
        fresh: list[str] = []
        for _ in range(num - len(wanted)):
            try:
                self._actors.append(self._start(next(free)))
            except OSError as error:  # as of too many processes
                there = len(wanted) + len(fresh)
                raise ControlError(
                    f"{there} of {num} actors run, raise this machine's limits to start more: {one_sentence(error)}"
                ) from error
            fresh.append(self._actors[-1].name)
        return fresh, [actor.name for actor in surplus]

    def start_again(self) -> None:
        """End every actor that runs, for `poll` to start: the hub has another address than they were started with."""
        for actor in self._actors:
            if not actor.given_up and not self._has_left(actor):
                actor.kill()
                actor.num_restarts -= 1  # no fault of its own
                actor.restart_at = actor.started_at

    def poll(self, now: float) -> None:
        """Restart what has died, end what takes too long to leave."""
        for actor in list(self._actors):
            if self._has_left(actor):
                self._some_left = True
                self._actors.remove(actor)
                actor.close_input()
            elif actor.poll() is not None and not actor.given_up:
                self._revive(actor, now)
        for one in list(self._leaving):
            if one.child.poll() is not None:
                one.child.close_input()
                self._leaving.remove(one)
            elif now >= one.terminate_at:
                one.terminate_at = now + LEAVE_S
                one.child.process.terminate()  # the first hands its leases back, the second ends it at once

    def sentences(self, now: float) -> list[tuple[str, str]]:
        """(actor, what its process does) of every actor, for those that the hub does not know."""
        told = []
        for actor in self._actors:
            if actor.given_up:
                what = f"was given up after {actor.num_restarts} restarts: see {actor.log_path}"
            elif actor.restart_at is not None and actor.poll() is not None:
                what = f"died and restarts in {max(0.0, actor.restart_at - now):.1f} s"
            else:
                what = (f"has run for {now - actor.started_at:.0f} s as process {actor.pid} and is not connected: "
                        f"it is still loading, or cannot reach the hub (see {actor.log_path})")
            told.append((actor.name, what))
        return told + [(one.child.name, "is leaving") for one in self._leaving]

    @staticmethod
    def _has_left(actor: Supervised) -> bool:
        return actor.poll() == 0

    def _retire(self, actor: Supervised, now: float) -> None:
        if actor.poll() is not None:
            actor.close_input()
            return
        asked = self._drain(actor.name, FINISH_S)
        if not asked:  # not connected: it holds nothing that could be finished
            actor.process.terminate()
        self._leaving.append(Leaving(actor, now + (FINISH_S if asked else 0.0) + LEAVE_S))

    def _revive(self, actor: Supervised, now: float) -> None:
        code = actor.poll()
        assert code is not None
        if actor.restart_at is None:
            age = now - actor.started_at
            if age > HEALTHY_S:
                actor.num_restarts = 0
            why = self._why_give_up(actor, code, age)
            if why:
                actor.given_up = True
                self._caller.say(
                    f"\n{actor.name} ended with status {code} after {actor.num_restarts} restarts: given up "
                    f"({why}). The end of {actor.log_path}:\n{last_words(actor.log_path)}", error=True)
                return
            actor.restart_at = now + (1.0 if age < QUICK_DEATH_S else 0.0)
            log.warning("%s ended with status %d: restarting it. Its last line (%s):\n%s",
                        actor.name, code, actor.log_path, log_tail(actor.log_path, 1))
        if now >= actor.restart_at:
            try:
                fresh = self._start(actor.name)
            except OSError as error:  # as of too many processes, for a while
                actor.restart_at = now + START_AGAIN_S
                log.warning("%s cannot be started, tried again in %g s: %s", actor.name, START_AGAIN_S,
                            one_sentence(error))
                return
            fresh.num_restarts = actor.num_restarts + 1
            fresh.same_deaths, fresh.last_line = actor.same_deaths, actor.last_line
            actor.close_input()
            self._actors[self._actors.index(actor)] = fresh

    def _why_give_up(self, actor: Supervised, code: int, age: float) -> str:
        """Why a dead actor is not started again; "" if it is."""
        last_line = OWN_LINE.sub("", log_tail(actor.log_path, 1).strip())
        again = code > 0 and age < HEALTHY_S and last_line == actor.last_line  # a signal leaves no last line
        actor.same_deaths, actor.last_line = actor.same_deaths + 1 if again else 1, last_line
        if code == EXIT_CONFIG:  # it stays one however often the actor starts
            return "a configuration error"
        if actor.same_deaths >= NUM_SAME_DEATHS:
            return f"the same words {NUM_SAME_DEATHS} times"
        return "launch.num_max_restarts" if actor.num_restarts >= self._num_max_restarts else ""
