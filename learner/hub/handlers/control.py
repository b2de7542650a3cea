"""Requests of `streamrl status`, which gets a sentence for each process, and of `streamrl drain`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from learner.hub.context.connections import Connection
from learner.hub.context.hub_context import HubContext
from streamrl.errors import ControlError
from streamrl.messages import Drain
from streamrl.transport.control import MOST_FINISH_S

log = logging.getLogger("streamrl.hub")

SILENT_BEATS = 3


class ControlHandler:
    """Answers each verb by a method of its own."""

    def __init__(self, hub: HubContext) -> None:
        self._hub = hub
        self._verbs = {"status": self._status, "drain": self._drain}

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a request. Raises ControlError for what cannot be done."""
        verb = self._verbs.get(request["verb"])
        if verb is None:
            raise ControlError(f"this hub does not know {request['verb']!r}: it is from another release")
        return verb(request)

    def _status(self, _request: Mapping[str, Any]) -> Mapping[str, Any]:
        hub = self._hub
        manifest = hub.weights.manifest
        return {
            "run_id": hub.settings.run_id, "version": hub.ledger.version, "total_steps": hub.settings.total_steps,
            "steps_per_batch": hub.ledger.lag.rule.steps_per_batch, "published": manifest is not None,
            "processes": sentences(hub, hub.clock()),
        }

    def _drain(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        name, within_s = str(request.get("actor", "")), request.get("within_s", 60.0)
        if not (isinstance(within_s, int | float) and 0.0 <= within_s <= MOST_FINISH_S):
            raise ControlError(f"within_s must be a number from 0 to {MOST_FINISH_S:g}, not {within_s!r:.50}")
        actor = self._hub.connections.by_actor.get(name)
        if actor is None:
            raise ControlError(f"no actor {name!r} is connected{self._known(name)}")
        if not actor.max_leases:
            raise ControlError(f"{name} is a relay and holds no leases: stop it by a signal")
        num_leases = self._hub.ledger.num_leases(name)
        if not self._hub.send.to_actor(actor.routing_id, Drain("streamrl drain", float(within_s))):
            raise ControlError(f"{name} could not be reached: its connection is broken or full; try again")
        finish = f"finish its {num_leases} leases and leave" if num_leases else "leave: it has no leases"
        log.info("%s is told to %s", name, finish)
        return {"actor": name, "num_leases": num_leases}

    def _known(self, name: str) -> str:
        names = sorted(self._hub.connections.by_actor)
        if not names:
            return ": no actor is"
        near = get_close_matches(name, names, n=1)
        return f". Did you mean {near[0]}?" if near else f": connected are {', '.join(names[:8])}"


def sentences(hub: HubContext, now: float) -> list[tuple[str, str]]:
    """Describe the learner's ranks, the hub and every actor: (process, sentence) of each."""
    told = hub.rank_watch.sentences(now, hub.waiting_for) or [("learner", "is not heard of yet")]
    told.append(("hub", _of_hub(hub)))
    told += [(one.actor_id, _actor(hub, one, now)) for one in sorted(hub.connections.all(), key=_name)]
    return told + [(name, f"was shut out because {cause}") for name, cause in sorted(hub.trust.causes.items())]


def _name(actor: Connection) -> tuple[int, str]:
    return len(actor.actor_id), actor.actor_id  # actor-2 before actor-10


def _of_hub(hub: HubContext) -> str:
    num = len(hub.connections)
    if hub.weights.manifest is None:
        return "waits for the learner to publish its first version"
    if not num:
        return "waits for actors: none is connected"
    actors = f"{num} actor{'s' if num > 1 else ''}"
    if hub.waiting_for:
        return f"waits for {actors}: {hub.waiting_for}"
    return f"serves {actors} and waits for the learner, which is at work"


def _actor(hub: HubContext, actor: Connection, now: float) -> str:
    silent_s, settings = now - actor.heard_at, hub.settings.hub
    if silent_s > SILENT_BEATS * settings.heartbeat_s:
        return (f"has been silent for {silent_s:.1f} s; after hub.dead_after_s={settings.dead_after_s:g} its leases go "
                "to others")
    if not actor.max_leases:
        return f"is a relay: it passes weights on, has version {actor.version}"
    if actor.state == "quarantined":
        return f"gets no leases: its version {actor.version} does not score as the learner does (quarantined)"
    loads = "up_s" not in actor.stats  # which heartbeats have once all parts of the actor are made
    does = hub.ledger.actor_status(actor.actor_id, now, loads=loads)
    return f"{does}; version {actor.version}, {actor.tokens_per_s:.0f} tokens/s"
