"""Actors' messages: who is on which connection, what they say, what they are told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from learner.hub.handlers.connections import Link, Links
from learner.hub.weight_health import WeightHealthTable
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
    Stop,
    StopReason,
    Welcome,
)
from streamrl.messages.codec import Decoder, encode, protocol_of

if TYPE_CHECKING:
    from learner.hub.server import HubServer

log = logging.getLogger("streamrl.hub")

ACK_FLUSH_S = 0.02
REANNOUNCE_S = 10.0
EXIT_CODES = {StopReason.FINISHED: 0, StopReason.FENCED: 3, StopReason.PROTOCOL: 4, StopReason.WRONG_RUN: 6}


class ActorHandler:
    """Decodes, looks up the link, asks the ledger, answers. Decides nothing itself."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.links = Links()
        self.checks = WeightHealthTable(hub.weights.root_of, hub.settings.probe_tolerance)
        self.num_actor_restarts = 0
        self.tokens_generated = 0
        self._decoder = Decoder(TO_HUB, hub.settings.limits.max_message_bytes)
        self._incarnations: dict[str, int] = {}
        self._ack_at = 0.0
        self._beats = 0

    # --- incoming ---------------------------------------------------------------------------------------------------

    def received(self, routing_id: bytes, frames: list[bytes], now: float) -> None:
        link = self.links.of_route(routing_id)
        try:
            if len(frames) != 1:
                raise WireError(f"expected one frame, got {len(frames)}")
            message = self._decoder.decode(frames[0])
        except WireError as error:
            self.hub.counters[f"num_wire_errors_{error.counter}"] += 1
            who = link.actor_id if link else "a stranger"
            log.warning("refused a message of %s (%s): %s", who, error.counter, error)
            if link is None and isinstance(error, ProtocolVersionError):
                self._stop_other_protocol(routing_id, frames[0])
            self._strike(link, str(error), now)
            return
        if isinstance(message, Hello):
            self._hello(routing_id, message, now)
        elif link is None:
            self._stop(routing_id, StopReason.NO_LINK, "say HELLO first", rejoin=True)
        else:
            link.heard_at = now
            self._linked(link, message, frames[0], now)

    def _stop_other_protocol(self, routing_id: bytes, frame: bytes) -> None:
        """In the stranger's own number, or it could not read it: STOP is the same in every protocol."""
        theirs = protocol_of(frame)
        assert theirs is not None
        detail = (
            f"this actor speaks protocol {theirs}, the hub {PROTOCOL}: install the same release of streamrl on both "
            "sides"
        )
        stop = Stop(StopReason.PROTOCOL, False, 0.0, EXIT_CODES[StopReason.PROTOCOL], detail)
        self.hub.send_control(routing_id, encode(stop, protocol=theirs))

    def _linked(self, link: Link, message: Message, frame: bytes, now: float) -> None:
        ledger = self.hub.ledger
        match message:
            case Group():
                verdict = ledger.accept(link.actor_id, message, frame, now)
                if verdict.kind == "rejected" and not verdict.strike:
                    log.debug("rejected(%s) from %s: %s", verdict.reason.name.lower(), link.actor_id, verdict.detail)
                if verdict.strike:
                    log.warning("rejected(%s) from %s: %s", verdict.reason.name.lower(), link.actor_id, verdict.detail)
                    self._strike(link, verdict.detail, now)
            case ActorHeartbeat():
                self._beat(link, message, now)
            case Installed():
                self._installed(link, message, now)
            case Drain():
                log.info("%s leaves: %s", link.actor_id, message.reason)
                ledger.drain(link.actor_id, now)
            case Bye():
                ledger.bye(link.actor_id, now)
                self.checks.forget(link.actor_id)
                self._send(link.routing_id, Bye(message.last_seq, "bye"))
                self.links.drop(link.actor_id)
                log.info("%s left: %s", link.actor_id, message.note)

    def _hello(self, routing_id: bytes, hello: Hello, now: float) -> None:
        settings, weights = self.hub.settings, self.hub.weights
        if not hello.protocol_min <= PROTOCOL <= hello.protocol_max:
            detail = (
                f"actor {hello.actor_id} speaks protocols {hello.protocol_min}-{hello.protocol_max}, this hub "
                f"{PROTOCOL}: install the same release of streamrl on both sides"
            )
            self._stop(routing_id, StopReason.PROTOCOL, detail)
            return
        if hello.run_id is not None and hello.run_id != settings.run_id:
            detail = f"this is run {settings.run_id}, the actor belongs to {hello.run_id}"
            self._stop(routing_id, StopReason.WRONG_RUN, detail)
            return
        if weights.manifest is None:
            self._stop(routing_id, StopReason.BUSY, "version 0 is not published yet", rejoin=True, retry_after_s=0.5)
            return
        if hello.installed is not None and not self.checks.usable(hello.actor_id, hello.incarnation, *hello.installed):
            hello = msgspec.structs.replace(hello, installed=None)
        verdict = self.hub.ledger.hello(hello.actor_id, hello, now)
        if verdict.stop is not None:
            self._send(routing_id, verdict.stop)
            return
        link = self._bind(routing_id, hello, now)
        self._send(routing_id, Welcome(
            protocol=PROTOCOL, run_id=settings.run_id, learner_epoch=settings.learner_epoch,
            version=weights.manifest.ref.version, lineage=self.hub.ledger.lineage, limits=settings.limits,
            task=settings.welcome_task.encode(), layout=weights.layout, manifest=weights.manifest,
            offers=self.hub.devices.offers(link), pull_token=weights.pull_token, assets_nbytes=len(weights.assets),
            assets_digest=weights.assets_digest, settled_upto=verdict.settled_upto, settled=tuple(verdict.settled),
            durable_upto=verdict.durable_upto, durable=tuple(verdict.durable), held=tuple(verdict.held),
        ))

    def _bind(self, routing_id: bytes, hello: Hello, now: float) -> Link:
        old = self.links.of_actor(hello.actor_id)
        if old is not None and old.incarnation != hello.incarnation:
            self._stop(old.routing_id, StopReason.FENCED, "a newer process with this actor_id has taken over")
        known = self._incarnations.get(hello.actor_id)
        if known is None and not hello.slots:
            log.info("%s joined: it passes weights on and takes no leases", hello.actor_id)
        elif known is None:
            log.info("actor %s joined (%s, %d slots)", hello.actor_id, hello.engine, hello.slots)
        elif known != hello.incarnation:
            self.num_actor_restarts += 1
            log.info("actor %s was restarted and joined again", hello.actor_id)
        self._incarnations[hello.actor_id] = hello.incarnation
        link = Link(
            routing_id, hello.actor_id, hello.incarnation, heard_at=now, transports=hello.transports,
            device=hello.device, slots=hello.slots,
        )
        self.links.bind(link)
        return link

    def _beat(self, link: Link, beat: ActorHeartbeat, now: float) -> None:
        said, link.version = beat, str(beat.installed) if beat.installed else "-"
        if beat.installed is not None and not self.checks.usable(
            link.actor_id, link.incarnation, beat.installed, beat.root
        ):
            beat = msgspec.structs.replace(beat, installed=None)  # whatever it serves, it is not ours
        self.hub.ledger.beat(link.actor_id, beat, now)
        quarantined = self.checks.quarantined(link.actor_id, link.incarnation)
        link.state = "quarantined" if quarantined else beat.state.name.lower()
        if not link.slots:
            link.state = "relay"
        link.stats = beat.stats
        self.tokens_generated += link.count_tokens(beat.tokens_total, now)
        self.hub.devices.beat(link, beat, now)
        # An actor in quarantine has the newest version: being told again would only make it fail again.
        self._announce_again(link, said if quarantined else beat, now)
        self._beats += 1
        ledger = self.hub.ledger
        self._send(link.routing_id, HubHeartbeat(
            self._beats, self.hub.settings.learner_epoch, ledger.version, ledger.min_useful(),
            self.hub.ranks.waiting_for[:128],
        ))

    def _announce_again(self, link: Link, beat: ActorHeartbeat, now: float) -> None:
        """An actor that stays behind may have failed to fetch or install: it is told again, not left for ever."""
        manifest = self.hub.weights.manifest
        if manifest is None or (beat.installed is not None and beat.installed >= manifest.ref):
            link.announced_at = now
        elif now - link.announced_at > REANNOUNCE_S and not self.hub.devices.expects(link, manifest):
            link.announced_at = now
            self.hub.devices.announce(link)

    def _installed(self, link: Link, message: Installed, now: float) -> None:
        who, ledger = (link.actor_id, link.incarnation), self.hub.ledger
        if not message.ok:
            self.hub.counters["num_install_failures"] += 1
            log.warning("%s refused version %s: %s", link.actor_id, message.target, message.error)
            ledger.installed(link.actor_id, message.target, False, now)
            return
        if self.checks.wrong_root(*who, message.target, message.root):
            ledger.installed(link.actor_id, message.target, False, now)
            self._strike(link, "wrong root", now)
            return
        self.hub.counters["num_installs"] += 1
        self.hub.counters[f"num_installs_{message.source.name.lower()}"] += 1
        self.hub.weights.count_install(message, now)
        if message.probe is not None:
            self.checks.probed(*who, message.target, message.probe)
        if self.checks.quarantined(*who):
            ledger.suspend(link.actor_id, now)
        else:
            ledger.installed(link.actor_id, message.target, True, now)

    # --- outgoing ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time passes: silent actors lose their leases, revocations go out."""
        for effect in self.hub.ledger.tick(now):
            link = self.links.of_actor(effect.actor_id)
            if link is None:
                continue
            if effect.kind == "revoke":
                self._send(link.routing_id, Leases((), effect.leases))
                continue
            log.warning("actor %s is silent for %.1f s: its %d leases go to others",
                        link.actor_id, now - link.heard_at, len(effect.leases))
            self._stop(link.routing_id, StopReason.EVICTED, "silent for too long", rejoin=True)
            self.links.drop(link.actor_id)

    def grant(self, now: float) -> None:
        """Give leases round robin, a few at a time, until nobody can take more."""
        ledger = self.hub.ledger
        granted = True
        while granted:
            granted = False
            for actor_id in ledger.grant_order(now):
                link = self.links.of_actor(actor_id)
                if link is None:
                    continue
                leases = ledger.grant(actor_id, now)
                batches = [leases[first : first + 64] for first in range(0, len(leases), 64)]
                if not all([self._send(link.routing_id, Leases(tuple(batch), ())) for batch in batches]):
                    # A lease that never arrived would be renewed by every heartbeat; the actor says HELLO again.
                    ledger.evict(actor_id, now)
                    self.links.drop(actor_id)
                granted = granted or bool(leases)

    def flush_acks(self, now: float) -> None:
        if now - self._ack_at < ACK_FLUSH_S:
            return
        self._ack_at = now
        for link in self.links.all():
            self._send_ack(link)

    def _send_ack(self, link: Link) -> None:
        ack = self.hub.ledger.take_acks(link.actor_id)
        if ack is None:
            return
        if not self.hub.settings.keep_until_durable:  # no checkpoints before the end: nothing to wait for
            ack = msgspec.structs.replace(ack, durable_upto=ack.settled_upto, durable=ack.accepted)
        self._send(link.routing_id, ack)

    def stop_all(self, reason: str, *, finished: bool) -> None:
        for link in self.links.all():
            self._send_ack(link)
            if finished:
                self._stop(link.routing_id, StopReason.FINISHED, reason)
            else:
                self._stop(link.routing_id, StopReason.RESTARTING, reason, rejoin=True, retry_after_s=1.0)

    def _strike(self, link: Link | None, detail: str, now: float) -> None:
        if link is not None and link.strike(now):
            self.hub.counters["num_evictions_for_strikes"] += 1
            self._stop(link.routing_id, StopReason.EVICTED, f"three strikes, the last: {detail}", rejoin=True)
            self.hub.ledger.evict(link.actor_id, now)
            self.links.drop(link.actor_id)

    def _stop(
        self, routing_id: bytes, reason: StopReason, detail: str, *, rejoin: bool = False, retry_after_s: float = 0.0
    ) -> None:
        self._send(routing_id, Stop(reason, rejoin, retry_after_s, EXIT_CODES.get(reason, 1), detail[:512]))

    def _send(self, routing_id: bytes, message: Message) -> bool:
        return self.hub.send_control(routing_id, encode(message))
