"""The real hub under examination conditions: one thread, no learner, and an ear on every message of one actor.

Sockets, handlers, ledger and weight server are those of a run. The examiner takes the learner's part by calling the
ledger, and the network's part by not passing messages on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import xxhash

from learner.hub.context.hub_context import Outbound
from learner.hub.context.settings import HubSettings
from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.dedup import DedupEntry
from learner.hub.server import POLL_MS, TICK_S, HubServer
from streamrl.messages import (
    PROTOCOL,
    Ack,
    Announce,
    Group,
    Hello,
    LeaseRef,
    Manifest,
    Message,
    Publish,
    RejectReason,
    VersionRef,
)
from streamrl.messages.codec import MAGIC, PREAMBLE, encode
from streamrl.stream.records import StepTaken
from tests.conform.watch import Watch
from tests.conform.weights import Model, Pulls, WatchedSocket

LIMITS = {
    "heartbeat_s": 0.25, "hub_silent_s": 1.5, "ack_timeout_s": 1.0, "chunk_timeout_s": 2.0, "drain_deadline_s": 20.0,
    "bye_timeout_s": 2.0,
}
"""Short ones, so that an examination takes seconds."""


class _Heard(Outbound):
    """Sends as the hub does, unless `may_send` says no; `sent` hears what leaves."""

    may_send: Callable[[Message], bool]
    sent: Callable[[bytes, Message], None]
    extended = False
    """Append a field to every message, as a later release may."""

    def to_actor(self, routing_id: bytes, message: Message, *, protocol: int = PROTOCOL) -> bool:
        if not self.may_send(message):
            return True
        self.sent(routing_id, message)
        if not self.extended:
            return super().to_actor(routing_id, message, protocol=protocol)
        return self.raw(routing_id, extended(message))

    def raw(self, routing_id: bytes, frame: bytes | bytearray) -> bool:
        return self._send(self._actors, routing_id, bytearray(frame))


def extended(message: Message) -> bytes:
    """The frame of `message` as a release with one more field would send it."""
    body = msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(message)[PREAMBLE.size :]), "of a later release"])
    return frame_of(message.KIND, body)


def frame_of(kind: int, body: bytes, *, damage: int = 0) -> bytes:
    """A frame with this body; its digest is wrong by `damage`."""
    return PREAMBLE.pack(MAGIC, PROTOCOL, kind, 0, xxhash.xxh3_64_intdigest(body) ^ damage) + body


class ExaminedHub(HubServer):
    """A hub whose loop the examiner turns, `turn` by `turn`.

    Attributes:
        watch: the incarnation that is examined; what others send is not heard.
        granting: whether leases go out.
        losing: messages of the actor that get lost on the way, by type; () loses none.
        holding_acks: no ACK leaves.
        rejecting: the next new GROUP is rejected as STALE.
    """

    def __init__(self, settings: HubSettings, model: Model, pulls: Pulls, watch: Watch) -> None:
        super().__init__(settings)
        self.model, self.watch = model, watch
        self.granting = self.holding_acks = self.rejecting = False
        self.losing: tuple[type[Message], ...] = ()
        self.route = b""
        self.pulls = pulls
        self.heard = _Heard(self._actor_socket, self._rank_socket, self.context.counters)
        self.heard.may_send, self.heard.sent = self._may_send, self._sent
        self.context.send = self.heard
        self.context.weights.socket = WatchedSocket(self.context.weights.socket, pulls)
        self.context.weights.socket.start()
        self._tick_at = 0.0
        self._routes: set[bytes] = set()
        self._former: set[bytes] = set()
        self._published: Publish | None = None

    def examine(self, watch: Watch) -> None:
        """From now on a new process is examined; what the former one still says is of no interest."""
        self._former |= self._routes
        self._routes, self.route = set(), b""
        self.granting = self.holding_acks = self.rejecting = self.heard.extended = False
        self.losing = ()
        if self.watch.hellos:
            self.ledger.evict(self.watch.actor_id, time.monotonic())
            self.context.connections.drop(self.watch.actor_id)
        self.watch = watch

    @property
    def ledger(self) -> Ledger:
        return self.context.ledger

    def turn(self) -> None:
        """Serve what is there, for 20 ms at most; one turn of the loop of a run's hub without its learner."""
        ready = self._actor_socket.poll(POLL_MS)
        now = time.monotonic()
        if ready:
            self._drain_actors(now)
        if now >= self._tick_at:
            self._actors.tick(now)
            self._tick_at = now + TICK_S
        if self.granting:
            self._actors.grant(now)
        if not self.holding_acks:
            self._actors.flush_acks(now)

    # --- what passes ------------------------------------------------------------------------------------------------

    def received(self, routing_id: bytes, frames: list[bytes], now: float, key_name: str | None) -> None:
        if routing_id in self._former:
            super().received(routing_id, frames, now, key_name)
            return
        message = self.watch.received(frames)
        if message is not None:
            self.route = routing_id
            self._routes.add(routing_id)
        if isinstance(message, Hello) and not issubclass(Hello, self.losing):
            self.losing = ()  # what follows is a new connection
        if isinstance(message, self.losing):
            return
        if isinstance(message, Group) and self.rejecting and self.watch.sent[message.seq].times == 1:
            self.rejecting = False
            self._reject(message, now)
            return
        super().received(routing_id, frames, now, key_name)

    def _may_send(self, message: Message) -> bool:
        return not (self.holding_acks and isinstance(message, Ack))

    def _sent(self, routing_id: bytes, message: Message) -> None:
        if routing_id == self.route:
            self.watch.told(message)

    def _reject(self, group: Group, now: float) -> None:
        """As the ledger does it, for a reason that is no fault of the actor."""
        self._entry().reject(group.seq, RejectReason.STALE, "rejected by the examiner")
        if (group.group_id, group.attempt) in self.open_leases():
            self.ledger.actors.release(group.group_id, now, failed=False)

    def _entry(self) -> DedupEntry:
        entry = self.ledger.dedup.get(self.watch.actor_id, self.watch.incarnation)
        assert entry is not None
        return entry

    # --- the network's part -----------------------------------------------------------------------------------------

    def drop_connection(self) -> None:
        """As after a reconnect that ZeroMQ made silently: the next message gets STOP(NO_LINK)."""
        self.context.connections.drop(self.watch.actor_id)

    def send(self, message: Message) -> None:
        """A message that the hub's own handlers would not send now."""
        self.heard.to_actor(self.route, message)

    def refuse_incarnation(self) -> None:
        """A newer process takes the actor's name."""
        hello = msgspec.structs.replace(
            self.watch.hellos[0], incarnation=self.watch.incarnation ^ 1 or 2, next_seq=1, outbox=(), held=(),
        )
        assert isinstance(hello, Hello)
        super().received(b"\0examiner", [bytes(encode(hello))], time.monotonic(), None)

    # --- the learner's part -----------------------------------------------------------------------------------------

    @property
    def newest(self) -> VersionRef:
        return VersionRef(self.context.settings.learner_epoch, self.ledger.version)

    def open_leases(self) -> set[LeaseRef]:
        """What the ledger holds the actor to."""
        actor = self.ledger.actors.get(self.watch.actor_id)
        return set() if actor is None else {(group_id, one.attempt) for group_id, one in actor.open_leases()}

    def revoke(self, refs: set[LeaseRef]) -> None:
        now = time.monotonic()
        for group_id, _ in refs & self.open_leases():
            self.ledger.actors.release(group_id, now, failed=False, revoke=True)
        self._actors.tick(now)

    def train(self) -> bool:
        """One step on the groups that are held; False if they are too few."""
        version = self.ledger.version
        if self.ledger.cut_batch(version) is None:
            return False
        self.ledger.end_batch(StepTaken(version + 1, False))
        return True

    def publish(self, *, forged_first: bool = False) -> Manifest:
        """The ledger's version, to every actor; or first, until `announce_published`, under a root that is made up."""
        first, now = self.context.weights.manifest is None, time.monotonic()
        self._published = self.model.publication(Path(self.context.settings.run_dir), self.newest, first=first)
        manifest = self._published.manifest
        self.watch.announced(manifest)
        self.context.weights.publish(self._published, now)
        if forged_first:
            made_up = os.urandom(16)
            self.watch.forbidden.add(made_up)
            self.announce(msgspec.structs.replace(manifest, root=made_up))
        else:
            self.announce_published()
        return manifest

    def announce_published(self) -> None:
        assert self._published is not None
        self.ledger.publish(self._published.manifest)
        self.broadcast.published(self._published, time.monotonic())

    def announce(self, manifest: Manifest) -> None:
        """This manifest, whether or not it is the newest."""
        self.send(Announce(manifest, self.context.weights.offers()))

    def save(self) -> bytes:
        """A checkpoint of the ledger, published."""
        version = self.ledger.version
        state = self.ledger.freeze(version)
        self.context.log.flush(time.monotonic())
        self.ledger.saved(version)
        return state

    def succeeded_by(self, state: bytes) -> ExaminedHub:
        """The hub of a learner that restarts from this checkpoint, at the same address; this one is gone.

        So is what its log was not handed yet, as when a machine loses its power: nothing of that was durable.
        """
        settings, epoch = self.context.settings, self.context.settings.learner_epoch + 1
        started = msgspec.structs.replace(
            settings.started, start=epoch, learner_epoch=epoch, version=self.ledger.version
        )
        path = Path(settings.run_dir) / "ledger.bin"
        path.write_bytes(state)
        address, watch = self.endpoint, self.watch
        self.ledger.journal.take()
        self.close()
        hub = ExaminedHub(msgspec.structs.replace(
            settings, started=started, restore_path=str(path), bind=address, lineage=self.ledger.versions.lineage,
        ), self.model, self.pulls, watch)
        hub._former = self._former
        return hub


def examination_settings(settings: HubSettings, model: Model) -> HubSettings:
    """`settings` of a run with limits that make an examination short, and chunks so small that weights need several."""
    bucket = max(model.layout().bucket_bytes)
    limits = msgspec.structs.replace(
        settings.limits, chunk_bytes=max(1024, min(settings.limits.chunk_bytes, -(-bucket // 3))), **LIMITS
    )
    return msgspec.structs.replace(settings, limits=limits, ledger=replace(settings.ledger, limits=limits))
