"""Actors' messages: checked against the connection, put to the ledger, answered."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

import msgspec

from learner.hub.context.connections import Connection, shut_out
from learner.hub.context.hub_context import HubContext
from learner.hub.handlers.broadcaster import BroadcastHandler
from learner.hub.ledger.grant import in_messages
from learner.hub.ledger.membership import stop_of
from learner.hub.ledger.tables.groups import GroupState
from learner.hub.observers.counters import Arrival
from streamrl.errors import ProtocolVersionError, WireError
from streamrl.messages import (
    PROTOCOL,
    TO_HUB,
    ActorHeartbeat,
    Bye,
    Drain,
    Group,
    Hello,
    HubHeartbeat,
    Installed,
    Leases,
    Message,
    RejectReason,
    Stop,
    StopReason,
    Welcome,
)
from streamrl.messages.codec import Decoder, protocol_of
from streamrl.messages.validate import sound
from streamrl.transport.keys import may_be
from streamrl.transport.peers import LogLimit
from streamrl.transport.session import MAX_UNSETTLED

log = logging.getLogger("streamrl.hub")

ACK_FLUSH_S, LEAST_FLUSH_S = 0.05, 0.02
"""Acks wait so long for more of them, and most of them for the log: so one message tells of both."""
ACK_EVERY = MAX_UNSETTLED // 4
"""Groups of one actor that are acknowledged without a wait: with more of them open, it would stop sending."""
MISSED_BEATS = 1.5
"""Heartbeats that an actor may be late before its connection is looked at."""
REANNOUNCE_S = 10.0
MAX_MOVES = 200
"""Lines at once, and one more a second, on who comes and goes: any peer may do that at any rate."""


class ActorHandler:
    """Puts messages to the ledger and sends what it answers; it makes no decision itself."""

    def __init__(self, hub: HubContext, broadcast: BroadcastHandler) -> None:
        self._hub, self._broadcast = hub, broadcast
        self._decoder = Decoder(TO_HUB, hub.settings.limits.max_message_bytes)
        self._incarnations: dict[str, int] = {}
        self._limited_log = LogLimit(log)
        self._moves = LogLimit(log, burst=MAX_MOVES)
        self._ack_at, self._acked_upto = 0.0, 0  # when, and the record up to which the log was on the disk then
        self._num_heartbeats = 0
        self._told_turn = hub.turns.number
        self._end: Stop | None = None

    # --- incoming ---------------------------------------------------------------------------------------------------

    def received(self, routing_id: bytes, frames: list[bytes], now: float, *, key_name: str | None = None) -> bool:
        """Handle one message of an actor; False for one of a peer without a name, which speaks no protocol of ours.

        Args:
            key_name: of the key that its connection was made with, "" if that was removed; None without keys.
        """
        actor = self._hub.connections.by_route.get(routing_id)
        if key_name == "":
            self._send(routing_id, stop_of(StopReason.AUTH, "the key of this actor was removed from the hub's list"))
            return True
        try:
            if len(frames) != 1:
                raise WireError(f"expected one frame, got {len(frames)}")
            message = self._decoder.decode(frames[0])
        except WireError as error:
            self._hub.counters[f"num_wire_errors_{error.counter}"] += 1
            peer = actor.actor_id if actor else "an unregistered peer"
            self._limited_log.warning("refused a message of %s (%s): %s", peer, error.counter, error)
            if actor is not None:
                self._refused(actor, error, now)
            elif isinstance(error, ProtocolVersionError):
                self._stop_other_protocol(routing_id, frames[0])
            else:
                return False
            return True
        if self._end is not None:
            if isinstance(message, (Hello, ActorHeartbeat)):  # it was joining while the others were told, or missed it
                self._send(routing_id, self._end)
        elif isinstance(message, Hello):
            self._hello(routing_id, message, now, key_name)
        elif actor is None:
            self._send(routing_id, stop_of(StopReason.NO_LINK, "send HELLO first", rejoin=True))
        else:
            actor.heard_at = now
            self._dispatch(actor, message, frames[0], now)
        return True

    def _refused(self, actor: Connection, error: WireError, now: float) -> None:
        """Have the actor of a damaged frame join again: so it sends what it has no answer about at once."""
        leaving = actor.state in ("draining", "leaving")  # it would end instead; it sends again by itself, later
        if not self._strike(actor, str(error), now) and not leaving:
            self._send(actor.routing_id, stop_of(StopReason.NO_LINK, f"a damaged message came: {error}", rejoin=True))

    def _stop_other_protocol(self, routing_id: bytes, frame: bytes) -> None:
        """Send STOP, which is the same in every protocol, under the peer's own number: it could read no other."""
        theirs = protocol_of(frame)
        assert theirs is not None
        stop = stop_of(StopReason.PROTOCOL, (
            f"this actor speaks protocol {theirs}, the hub {PROTOCOL}: install the same release of streamrl on both "
            "sides"
        ))
        self._hub.send.to_actor(routing_id, stop, protocol=theirs)

    def _dispatch(self, actor: Connection, message: Message, frame: bytes, now: float) -> None:
        hub = self._hub
        match message:
            case Group():
                result = hub.ledger.accept(actor.actor_id, message, frame, now)
                accepted = result.kind == "accepted"
                if accepted or result.reason == RejectReason.STALE:
                    num_open = hub.ledger.groups.num(GroupState.LEASED)
                    arrival = Arrival(actor.actor_id, message, len(frame), accepted, num_open)
                    for one in hub.observers:
                        one.group(arrival)
                if result.strike or result.kind == "rejected":
                    write = self._limited_log.warning if result.strike else log.debug
                    write("rejected(%s) from %s: %s", result.reason.name.lower(), actor.actor_id, result.detail)
                if result.strike:
                    self._strike(actor, result.detail, now)
                elif hub.ledger.num_to_accept(actor.actor_id) >= ACK_EVERY:
                    self._send_ack(actor)
            case ActorHeartbeat():
                self._heartbeat(actor, message, now)
            case Installed():
                self._installed(actor, message, now)
            case Drain():
                self._moves.info("%s is draining: %s", actor.actor_id, message.reason)
                hub.ledger.drain(actor.actor_id, now)
            case Bye():
                hub.ledger.bye(actor.actor_id, now)
                hub.weights.health.forget(actor.actor_id)
                self._send(actor.routing_id, Bye(message.last_seq, "bye"))
                self._remove(actor)
                self._moves.info("%s left: %s", actor.actor_id, message.note)

    def _hello(self, routing_id: bytes, hello: Hello, now: float, key_name: str | None) -> None:
        settings, weights, ledger = self._hub.settings, self._hub.weights, self._hub.ledger
        refusal = self._refusal(hello, key_name)
        if refusal is not None:
            self._send(routing_id, refusal)
            return
        if hello.installed is not None and not weights.health.usable(
            hello.actor_id, hello.incarnation, *hello.installed
        ):
            hello = msgspec.structs.replace(hello, installed=None)
        result = ledger.hello(hello.actor_id, hello, now)
        if result.stop is not None:
            self._send(routing_id, result.stop)
            return
        actor = self._connect(routing_id, hello, now)
        assert weights.manifest is not None
        self._send(routing_id, Welcome(
            protocol=PROTOCOL, run_id=settings.run_id, learner_epoch=settings.learner_epoch,
            version=weights.manifest.ref.version, lineage=ledger.versions.lineage, limits=settings.limits,
            task=settings.welcome_task.encode(), layout=weights.layout, manifest=weights.manifest,
            offers=self._broadcast.offers(actor), pull_token=weights.pull_token, assets_nbytes=len(weights.assets),
            assets_digest=weights.assets_digest, settled_upto=result.settled_upto, settled=tuple(result.settled),
            durable_upto=result.durable_upto, durable=tuple(result.durable), held=tuple(result.held),
            base=weights.base, turn=self._hub.turns.number,
        ))

    def _refusal(self, hello: Hello, key_name: str | None) -> Stop | None:
        """Return why this hub cannot take the actor, whatever the ledger holds; None if it can."""
        run_id = self._hub.settings.run_id
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", hello.actor_id) is None:
            return stop_of(StopReason.PROTOCOL, (
                f"the name {hello.actor_id!r} is not 1 to 64 of A-Z a-z 0-9 . _ - that begin with a letter or digit: "
                "set actors.actor_id"
            ))
        if key_name is not None and not may_be(hello.actor_id, key_name):
            return stop_of(StopReason.AUTH, (
                f"the key of {key_name} does not allow the name {hello.actor_id}: leave actors.actor_id out, or "
                f"choose {key_name} or {key_name}-..."
            ))
        if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
            return stop_of(StopReason.PROTOCOL, (
                f"actor {hello.actor_id} speaks protocols {hello.protocol_min}-{hello.protocol_max}, this hub "
                f"{PROTOCOL}: install the same release of streamrl on both sides"
            ))
        if hello.run_id not in (None, run_id):
            return stop_of(StopReason.WRONG_RUN, f"this is run {run_id}, the actor belongs to {hello.run_id}")
        if cause := self._hub.trust.refusal(hello.actor_id, hello.incarnation):
            return shut_out(cause)
        if self._hub.weights.manifest is None:
            return stop_of(StopReason.BUSY, "version 0 is not published yet", rejoin=True, retry_after_s=0.5)
        return None

    def _connect(self, routing_id: bytes, hello: Hello, now: float) -> Connection:
        old = self._hub.connections.by_actor.get(hello.actor_id)
        if old is not None and old.incarnation != hello.incarnation:
            self._send(old.routing_id, stop_of(StopReason.FENCED, "a newer process with this actor_id has taken over"))
        known = self._incarnations.get(hello.actor_id)
        if known is None and not hello.max_leases:
            self._moves.info("%s joined: a relay, which takes no leases", hello.actor_id)
        elif known is None:
            self._moves.info("actor %s joined (%s, at most %d leases)", hello.actor_id, hello.engine, hello.max_leases)
        elif known != hello.incarnation:
            self._hub.counters["num_actor_restarts"] += 1
            self._moves.info("actor %s was restarted and joined again", hello.actor_id)
        self._incarnations[hello.actor_id] = hello.incarnation
        for one in self._hub.observers:
            one.joined(hello, is_new=known != hello.incarnation)
        actor = Connection(
            routing_id, hello.actor_id, hello.incarnation, heard_at=now, transports=hello.transports,
            device=hello.device, max_leases=hello.max_leases, told_turn_at=now,
        )
        self._hub.connections.bind(actor)
        return actor

    def _heartbeat(self, actor: Connection, beat: ActorHeartbeat, now: float) -> None:
        hub, identity = self._hub, (actor.actor_id, actor.incarnation)
        trusted = beat = msgspec.structs.replace(beat, stats=sound(beat.stats))
        if beat.installed is not None and not hub.weights.health.usable(*identity, beat.installed, beat.root):
            trusted = msgspec.structs.replace(beat, installed=None)  # whatever it serves was not published
        quarantined = hub.weights.health.quarantined(*identity)
        hub.ledger.beat(actor.actor_id, trusted, now)
        actor.version = str(beat.installed) if beat.installed else "-"
        actor.state = "quarantined" if quarantined else beat.state.name.lower()
        if not actor.max_leases:
            actor.state = "relay"
        actor.stats, actor.turn = beat.stats, beat.turn
        for one in hub.observers:
            one.beat(actor.actor_id, beat.stats, now)
        hub.counters["tokens_generated"] += actor.count_tokens(beat.tokens_total, now)
        self._broadcast.beat(actor, trusted, now)
        # An actor in quarantine has the newest version: another announcement would only make it fail again.
        self._announce_again(actor, beat if quarantined else trusted, now)
        self._send(actor.routing_id, self._beat_of_hub())

    def _beat_of_hub(self) -> HubHeartbeat:
        hub = self._hub
        self._num_heartbeats += 1
        return HubHeartbeat(
            self._num_heartbeats, hub.settings.learner_epoch, hub.ledger.version, hub.ledger.lag.min_useful(),
            hub.waiting_for[:128], hub.turns.number,
        )

    def _announce_again(self, actor: Connection, beat: ActorHeartbeat, now: float) -> None:
        """Tell an actor that stays behind again: it may have failed to fetch or install."""
        manifest, membership = self._hub.weights.manifest, self._broadcast.membership
        if manifest is None or (beat.installed is not None and beat.installed >= manifest.ref):
            actor.announced_at = now
        elif now - actor.announced_at > REANNOUNCE_S and not membership.expects(actor.actor_id, manifest.ref):
            actor.announced_at = now
            self._broadcast.announce(actor)

    def _installed(self, actor: Connection, message: Installed, now: float) -> None:
        hub, identity = self._hub, (actor.actor_id, actor.incarnation)
        health = hub.weights.health
        if not message.ok:
            hub.counters["num_install_failures"] += 1
            self._limited_log.warning("%s refused version %s: %s", actor.actor_id, message.target, message.error)
            hub.ledger.installed(actor.actor_id, message.target, False, now)
            return
        if health.wrong_root(*identity, message.target, message.root):
            hub.ledger.installed(actor.actor_id, message.target, False, now)
            self._strike(actor, "wrong root", now)
            return
        hub.counters["num_installs"] += 1
        hub.counters[f"num_installs_{message.source.name.lower()}"] += 1
        hub.weights.count_install(message, now)
        if message.probe is not None:
            health.probed(*identity, message.target, message.probe)
        if health.quarantined(*identity):
            hub.ledger.suspend(actor.actor_id, now)
        else:
            hub.ledger.installed(actor.actor_id, message.target, True, now)

    # --- outgoing ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Evict silent and dead actors and those that cannot be trusted, and send revocations."""
        for actor_id, cause in self._hub.trust.take_due():
            self._shut_out(actor_id, cause, now)
        for effect in self._hub.ledger.tick(now):
            actor = self._hub.connections.by_actor.get(effect.actor_id)
            if actor is None:
                continue
            if effect.kind == "revoke":
                self._send(actor.routing_id, Leases((), effect.leases))
                continue
            self._moves.warning("actor %s has been silent for %.1f s: its %d leases are reissued",
                                actor.actor_id, now - actor.heard_at, len(effect.leases))
            self._evict(actor, "silent for too long", now)
        for actor in self._hub.connections.all():
            self._evict_if_dead(actor, now)
        for actor in self._hub.turns.late(now):
            detail = "its engine has not given its memory back for the learner's turn"
            self._moves.warning("actor %s is evicted: %s", actor.actor_id, detail)
            self._evict(actor, detail, now, stop_of(StopReason.EVICTED, detail))

    def _evict_if_dead(self, actor: Connection, now: float) -> None:
        """Evict an actor whose connection is closed, as a dead process leaves it; `hub.dead_after_s` is far longer."""
        every_s = self._hub.settings.hub.heartbeat_s
        if min(now - actor.heard_at, now - actor.probed_at) < MISSED_BEATS * every_s:
            return
        actor.probed_at = now
        if self._hub.send.is_gone(actor.routing_id, self._beat_of_hub()):
            self._moves.warning("actor %s is gone, and its connection closed: its leases are reissued", actor.actor_id)
            self._evict(actor, "its connection is closed", now)

    def tell_turn(self, now: float) -> None:
        """Tell every actor at once that a turn has begun; each later heartbeat says so again."""
        if self._told_turn != self._hub.turns.number:
            self._told_turn = self._hub.turns.number
            for actor in self._hub.connections.all():
                actor.told_turn_at = now
                self._send(actor.routing_id, self._beat_of_hub())

    def grant(self, now: float) -> None:
        """Grant leases round robin, a few at a time, until no actor can take more; none in the learner's turn."""
        ledger, connections = self._hub.ledger, self._hub.connections
        granted = self._hub.turns.actors_may_work
        while granted:
            granted = False
            for actor_id in ledger.grant_order():
                actor = connections.by_actor.get(actor_id)
                if actor is None:
                    continue
                leases = ledger.grant(actor_id, now)
                if not all([self._send(actor.routing_id, Leases(part, ())) for part in in_messages(leases)]):
                    # A lease that never arrived would be renewed by every heartbeat; the actor sends HELLO again.
                    ledger.evict(actor_id, now)
                    connections.drop(actor_id)
                granted = granted or bool(leases)

    def flush_acks(self, now: float) -> None:
        """Acknowledge what has come, at the latest after `ACK_FLUSH_S`; sooner once the log has more of it."""
        durable, waited_s = self._hub.log.durable, now - self._ack_at
        if waited_s < (ACK_FLUSH_S if durable == self._acked_upto else LEAST_FLUSH_S):
            return
        self._ack_at, self._acked_upto = now, durable
        for actor_id in self._hub.ledger.acks_due():
            actor = self._hub.connections.by_actor.get(actor_id)
            if actor is not None:
                self._send_ack(actor)

    def _send_ack(self, actor: Connection) -> None:
        ack = self._hub.ledger.take_acks(actor.actor_id)
        if ack is None:
            return
        self._send(actor.routing_id, ack)

    def stop_all(self, reason: str, *, finished: bool) -> None:
        """Acknowledge everything, then stop every actor: for good, or until the learner is back."""
        self._end = (
            stop_of(StopReason.FINISHED, reason) if finished
            else stop_of(StopReason.RESTARTING, reason, rejoin=True, retry_after_s=1.0)
        )
        for actor in self._hub.connections.all():
            self._send_ack(actor)
            self._send(actor.routing_id, self._end)

    def _strike(self, actor: Connection, detail: str, now: float) -> bool:
        """Count a violation; returns whether the actor was evicted for it."""
        evicted = actor.strike(now)
        if evicted:
            self._hub.counters["num_evictions_for_strikes"] += 1
            self._evict(actor, f"three strikes, the last: {detail}", now)
        return evicted

    def evict_without_key(self, names: Collection[str], now: float) -> None:
        """End the connections of actors that no allowed key may call so."""
        for actor in self._hub.connections.all():
            if not any(may_be(actor.actor_id, name) for name in names):
                log.warning("%s is evicted: its key was removed", actor.actor_id)
                detail = "its key was removed from the hub's list"
                self._evict(actor, detail, now, stop_of(StopReason.AUTH, detail))

    def _shut_out(self, actor_id: str, cause: str, now: float) -> None:
        """Tell an actor why it must end; what it delivered and no batch has yet is generated again."""
        self._hub.ledger.distrust(actor_id, now)
        actor = self._hub.connections.by_actor.get(actor_id)
        if actor is not None:
            self._evict(actor, cause, now, shut_out(f"{actor_id} is shut out because {cause}"))

    def _evict(self, actor: Connection, detail: str, now: float, stop: Stop | None = None) -> None:
        self._send(actor.routing_id, stop or stop_of(StopReason.EVICTED, detail, rejoin=True))
        self._hub.ledger.evict(actor.actor_id, now)
        self._remove(actor)

    def _remove(self, actor: Connection) -> None:
        """Forget the connection of an actor that left or was evicted."""
        for one in self._hub.observers:
            one.remove(actor.actor_id)
        self._hub.weights.health.away(actor.actor_id)
        self._hub.connections.drop(actor.actor_id)

    def _send(self, routing_id: bytes, message: Message) -> bool:
        return self._hub.send.to_actor(routing_id, message)
