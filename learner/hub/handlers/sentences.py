"""The answer of `streamrl status`: one sentence a process says for whom or what it waits."""

from __future__ import annotations

from learner.hub.shared.connections import Connection
from learner.hub.shared.context import HubContext

SILENT_BEATS = 3


def sentences(hub: HubContext, now: float) -> list[tuple[str, str]]:
    """Describe the learner's ranks, the hub and every actor: (process, sentence) of each."""
    told = hub.rank_watch.sentences(now, hub.waiting_for) or [("learner", "is not heard of yet")]
    told.append(("hub", _hub(hub)))
    told += [(one.actor_id, _actor(hub, one, now)) for one in sorted(hub.connections.all(), key=_name)]
    return told + [(name, f"was shut out because {cause}") for name, cause in sorted(hub.trust.causes.items())]


def _name(actor: Connection) -> tuple[int, str]:
    return len(actor.actor_id), actor.actor_id  # actor-2 before actor-10


def _hub(hub: HubContext) -> str:
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
    return hub.ledger.what_it_does(actor.actor_id, now) + _speed(actor)


def _speed(actor: Connection) -> str:
    return f"; version {actor.version}, {actor.tokens_per_s:.0f} tokens/s"
