"""Weights from GPU to GPU at the hub: announcements, communicator membership, the life of the broadcaster process.

The hub touches no GPU. Its child process (`learner.broadcaster`) holds the communicator and the IPC buffers; the hub
starts it, watches it, replaces it when it dies or hangs, and never waits for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping

from learner.hub.context.broadcaster_process import EXIT_NO_MEMORY, BroadcasterProcess, BroadcasterWatch
from learner.hub.context.connections import Connection
from learner.hub.context.hub_context import HubContext
from streamrl.messages import (
    ActorHeartbeat,
    Announce,
    BroadcastAbort,
    BroadcastDocument,
    BroadcastForm,
    BroadcastReport,
    BroadcastSend,
    BroadcastStage,
    BroadcastUp,
    Manifest,
    Message,
    NcclTicket,
    Offer,
    Publish,
    Shutdown,
    VersionRef,
)
from streamrl.weights.gpu.membership import MAX_FAILURES, Abort, Effect, Invite, Membership, Pull, TurnOff

log = logging.getLogger("streamrl.hub")

RANKS_PER_ACTOR = 1
RECENT_VERSIONS = 3
"""The newest and the two before it: a member installed one of those."""
RESTART_FIRST_S, RESTART_MAX_S = 1.0, 30.0
SILENCE_GRACE_S = 5.0
"""How much longer than for one bucket a broadcaster may send no report; it sends one every second."""


class BroadcastHandler:
    """Announces versions, and manages epochs and the broadcaster process.

    Args:
        start: makes a broadcaster that reports to this hub's rank socket; None where no device transport is set.
    """

    def __init__(self, hub: HubContext, start: Callable[[], BroadcasterProcess] | None) -> None:
        publish = hub.settings.publish
        self._hub, self._start = hub, start
        self.membership = Membership(
            init_deadline_s=publish.nccl_init_deadline_s, bucket_deadline_s=publish.nccl_bucket_deadline_s
        )
        self._nccl = "nccl" in publish.transports
        self._broadcaster: BroadcasterProcess | None = None
        self._watch = BroadcasterWatch(publish.nccl_bucket_deadline_s + SILENCE_GRACE_S)
        self._ended: list[BroadcasterProcess] = []
        self._route: bytes | None = None
        self._up: BroadcastUp | None = None
        self._start_at = float("-inf")
        self._backoff_s = RESTART_FIRST_S
        self._publish: Publish | None = None
        self._recent: deque[VersionRef] = deque(maxlen=RECENT_VERSIONS)
        self._told_shared: set[str] = set()
        self.num_started = 0

    # --- what happens -------------------------------------------------------------------------------------------

    def published(self, message: Publish, now: float) -> None:
        """Announce the new version to every actor, with the transports open to it."""
        self._publish = message
        self._recent.append(message.manifest.ref)
        told: set[str] = set()
        ref = message.manifest.ref
        if self._start is not None and message.device_manifest is not None:
            self._send_document()
            if self._nccl:
                told = self._do(self.membership.set_candidates(self._candidates(), now), now)
                told |= self._do(self.membership.published(ref, now), now)
        for link in self._hub.connections.all():
            if link.actor_id not in told and not self.membership.expects(link.actor_id, ref):
                self.announce(link)

    def announce(self, link: Connection, ticket: NcclTicket | None = None) -> None:
        """Announce the newest version to one actor."""
        manifest = self._hub.weights.manifest
        assert manifest is not None
        self._hub.send.to_actor(link.routing_id, Announce(manifest, self.offers(link, ticket)))

    def offers(self, link: Connection, ticket: NcclTicket | None = None) -> tuple[Offer, ...]:
        """Offers of the newest version to this actor, in the order of the settings."""
        order = self._hub.settings.publish.transports
        offers = [offer for offer in self._hub.weights.offers() if offer.transport in order]
        device_manifest = self._device_manifest()
        if device_manifest is not None:
            nbytes = offers[-1].nbytes if offers else 0
            if self._shares_device(link) and self._up is not None:
                offers.append(Offer("ipc", self._up.socket, nbytes, manifest=device_manifest, slots=self._up.slots))
            if ticket is not None:
                offers.append(Offer("nccl", "", nbytes, manifest=device_manifest, nccl=ticket))
        return tuple(sorted(offers, key=lambda offer: order.index(offer.transport)))

    def beat(self, link: Connection, beat: ActorHeartbeat, now: float) -> None:
        """Follow an actor's state in the communicator, from its heartbeat."""
        link.installed = beat.installed
        if self._nccl and beat.nccl is not None and beat.nccl != link.nccl:
            link.nccl = beat.nccl
            self._do(self.membership.member_said(link.actor_id, beat.nccl, now), now)

    def broadcaster_reported(self, routing_id: bytes, message: BroadcastUp | BroadcastReport, now: float) -> None:
        """Handle a message of the broadcaster; those of a replaced one are ignored."""
        if isinstance(message, BroadcastUp):
            self._watch.heard()
            self._route, self._up, self._backoff_s = routing_id, message, RESTART_FIRST_S
            log.info("the broadcaster is up on %s", message.device or "its device")
            self._send_document()
            self.membership.broadcaster_up()
        elif routing_id == self._route:
            self._watch.heard()
            if message.stage is BroadcastStage.FAILED:
                log.warning("epoch %d failed at the broadcaster: %s", message.epoch, message.error)
            self._do(self.membership.broadcaster_said(message, now), now)

    def tick(self, now: float) -> None:
        """Let time pass: update members, enforce deadlines, replace a broadcaster that died or hangs."""
        if self._start is None:
            return
        self._watch.tick(now)
        self._ended = [one for one in self._ended if one.alive()]
        if self._broadcaster is not None and (not self._broadcaster.alive() or self._watch.hangs):
            alive, silent_s = self._broadcaster.alive(), self._watch.silent_s
            what = f"sent no report for {silent_s:.0f} s and is killed" if alive else "exited"
            log.error("the broadcaster process %s; actors pull until its successor is ready", what)
            full = self._broadcaster.exit_status() == EXIT_NO_MEMORY
            self._lost(now)
            if full:
                log.error("the learner's GPU has no memory for the broadcaster: no more weights by ipc or nccl in this "
                          "run, actors pull (leave both off publish.transports, or lower learner.gpu_memory_share)")
                self._start_at = float("inf")
        if self._broadcaster is None and now >= self._start_at:
            self._broadcaster = self._start()
            self._watch.started()
            self.num_started += 1
        if self._nccl:
            self._do(self.membership.set_candidates(self._candidates(), now), now)
            self._do(self.membership.tick(now), now)

    def metrics(self) -> Mapping[str, float]:
        if self._start is None:
            return {}
        one = self.membership
        return {
            "num_nccl_epochs": float(one.num_formed), "num_nccl_broadcasts": float(one.num_broadcasts),
            "num_nccl_given_up": float(one.num_given_up),
            "num_sender_restarts": float(max(0, self.num_started - 1)),
            "num_abandoned_threads": sum(
                link.stats.get("abandoned_threads", 0.0) for link in self._hub.connections.all()
            ),
        }

    def close(self) -> None:
        """End the broadcaster with its hub."""
        if self._broadcaster is not None:
            self._to_broadcaster(Shutdown("the hub ends", True))
            self._broadcaster.kill()
            self._broadcaster = None

    # --- inside -------------------------------------------------------------------------------------------------

    def _candidates(self) -> dict[str, int]:
        """READY actors that use nccl and have a recent version, one for each GPU, none on the broadcaster's."""
        able = [
            link for link in self._hub.connections.all()
            if "nccl" in link.transports and not link.nccl.broken
            and link.state == "running" and link.installed in self._recent
        ]
        # Members first: an epoch must not end because another actor of a GPU became able to join.
        able.sort(key=lambda link: (link.actor_id not in self.membership.members, link.actor_id))
        found: dict[str, int] = {}
        taken = {self._up.device: "the broadcaster"} if self._up is not None and self._up.device else {}
        for link in able:
            if link.device and (other := taken.setdefault(link.device, link.actor_id)) != link.actor_id:
                self._tell_shared(link, other)
            else:
                found[link.actor_id] = RANKS_PER_ACTOR
        return found

    def _tell_shared(self, link: Connection, other: str) -> None:
        """Log once that this actor takes no part: NCCL takes one rank of a GPU, a second would end every epoch."""
        if link.actor_id not in self._told_shared:
            self._told_shared.add(link.actor_id)
            if not self._shares_device(link):
                log.info("%s is on the GPU of %s (%s) and takes no part in nccl: it pulls", link.actor_id, other,
                         link.device)

    def _shares_device(self, link: Connection) -> bool:
        """Return whether this actor reports the broadcaster's GPU; opening the buffers will prove it."""
        up = self._up
        if up is None or up.slots is None or "ipc" not in self._hub.settings.publish.transports:
            return False
        return "ipc" in link.transports and link.device == up.device

    def _device_manifest(self) -> Manifest | None:
        publish, manifest = self._publish, self._hub.weights.manifest
        if publish is None or manifest is None or publish.manifest.ref != manifest.ref:
            return None
        return publish.device_manifest

    def _do(self, effects: list[Effect], now: float) -> set[str]:
        """Carry out the effects; returns the actors to which the newest version was announced."""
        publish, told = self._hub.settings.publish, set()
        for effect in effects:
            match effect:
                case BroadcastForm() | BroadcastSend():
                    self._to_broadcaster(effect)
                case Invite(epoch, ref, unique_id, world, first_rank):
                    log.debug("epoch %d of %d ranks is to bring version %s", epoch, world, ref)
                    deadlines = publish.nccl_init_deadline_s, publish.nccl_bucket_deadline_s
                    told |= self._announce_to(ref, {
                        member: NcclTicket(epoch, unique_id, world, rank, *deadlines)
                        for member, rank in first_rank.items()
                    })
                case Pull(ref, members):
                    told |= self._announce_to(ref, dict.fromkeys(members))
                case Abort(epoch, reason, hung):
                    log.warning("epoch %d is over: %s", epoch, reason)
                    if hung:
                        log.error("the broadcaster hangs in epoch %d: killed and replaced", epoch)
                        self._lost(now)
                    else:
                        self._to_broadcaster(BroadcastAbort(epoch))
                case TurnOff(reason):
                    log.error("no more weights by nccl in this run, actors pull: %d epochs in a row failed, the last "
                              "one because %s", MAX_FAILURES, reason)
        return told

    def _announce_to(self, ref: VersionRef, tickets: Mapping[str, NcclTicket | None]) -> set[str]:
        """Announce the version to these actors if it is still the newest; returns those that are connected."""
        manifest, told = self._hub.weights.manifest, set()
        for actor_id, ticket in tickets.items():
            link = self._hub.connections.by_actor.get(actor_id)
            if link is not None and manifest is not None and manifest.ref == ref:
                told.add(actor_id)
                self.announce(link, ticket)
        return told

    def _lost(self, now: float) -> None:
        """Kill the broadcaster, and keep its handle until it has been reaped, which may take long."""
        if self._broadcaster is not None:
            self._broadcaster.kill()
            self._ended.append(self._broadcaster)
        self._broadcaster, self._route, self._up = None, None, None
        self._start_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, RESTART_MAX_S)
        self._do(self.membership.broadcaster_down(), now)

    def _send_document(self) -> None:
        publish, layout = self._publish, self._hub.weights.layout
        if publish is not None and publish.device_manifest is not None and layout is not None:
            self._to_broadcaster(BroadcastDocument(publish.manifest, publish.device_manifest, publish.path, layout))

    def _to_broadcaster(self, message: Message) -> None:
        if self._route is not None:
            self._hub.send.to_rank(self._route, message)
