"""The hub process: sockets around the ledger.

    actors --HELLO, GROUP, HEARTBEAT, INSTALLED--> ROUTER "actors" --> Ledger --WELCOME, LEASES, ACK, ANNOUNCE--> actors
    ranks  --BATCH_REQUEST, STEP_DONE, PUBLISH---> ROUTER "ranks" ---> Ledger --BATCH_SHARE, SNAPSHOT, STATUS---> ranks
    actors --PULL--------------------------------> ROUTER "weights" (in its own thread: bulk must not delay a heartbeat)

What happens to groups, batches and versions is appended to the run's log (`RunLog`), whose own thread writes it; a
group is durable, and its actor may forget it, once the log is.

One thread, one poll loop, three handlers that share a `HubContext`. What waits for what: a rank's request needs B
groups from `Ledger.cut_batch`; a group needs a lease; `Ledger.grant` needs capacity (a finished step), an installed
version (INSTALLED) and a free slot (GROUP or HEARTBEAT). So after every event the loop tries to cut and to grant.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from learner.hub.context.broadcaster_process import BroadcasterProcess
from learner.hub.context.connections import Connections
from learner.hub.context.hub_context import HubContext, Outbound
from learner.hub.context.settings import HubSettings
from learner.hub.context.weight_server import WeightServer
from learner.hub.handlers.actors import ActorHandler
from learner.hub.handlers.broadcaster import BroadcastHandler
from learner.hub.handlers.control import ControlHandler
from learner.hub.handlers.ranks import RankHandler
from learner.hub.setup import open_ledger
from learner.hub.status import write_hub_json, write_status
from streamrl.config.addresses import advertised, in_url, is_wildcard
from streamrl.errors import ConfigError
from streamrl.messages import InstallSource
from streamrl.metrics.files import read_object
from streamrl.run_dirs import LAUNCH_NOTE
from streamrl.transport.authentication import Authenticator
from streamrl.transport.control import ControlServer
from streamrl.transport.keys import KeyDirectory, RankKeys
from streamrl.transport.peers import PeerLimit, retry_soon
from streamrl.transport.sockets import allow_ipv6, bind, bound_endpoint, hub_router
from streamrl.weights.transport import device_transports

log = logging.getLogger("streamrl.hub")

POLL_MS = 20
TICK_S = 0.1
TICK_SHARE = 0.1
"""Of the loop's time at most: with thousands of actors, ticks are rarer."""
MAX_DRAINED = 256
GOODBYE_S = 2.0
"""A hub waits so long for the actors of a finished run to leave."""
NO_ACTOR_S = 10.0
"""A hub with weights and without actors says so this often."""
ALWAYS = (
    "num_actor_restarts", "num_connections_ended", "tokens_generated", "num_evictions_for_strikes",
    "num_sends_refused", "num_sends_unreachable",
    *(f"num_installs_{source.name.lower()}" for source in InstallSource),
)
"""Counters that are there from the start; those by reason come with the first of their kind."""
UNREAD_PER_ACTOR = 4096
"""Receive limit in messages; an actor's outbox and leases bound them long before."""


class HubServer:
    """Owns the sockets and the loop; see the drawing above."""

    def __init__(
        self, settings: HubSettings, *,
        start_broadcaster: Callable[[HubSettings], BroadcasterProcess] = BroadcasterProcess,
        rank_keys: RankKeys | None = None,
    ) -> None:
        # Two contexts: ZAP asks one authenticator per context, and ranks have other keys than actors.
        self._zmq, self._rank_zmq = zmq.Context(), zmq.Context()
        try:
            self._open(settings, start_broadcaster, rank_keys)
        except BaseException:  # a thread's process lives on, and would wait for open sockets when it drops the contexts
            self._zmq.destroy(linger=0)
            self._rank_zmq.destroy(linger=0)
            raise

    def _open(
        self, settings: HubSettings, start_broadcaster: Callable[[HubSettings], BroadcasterProcess],
        rank_keys: RankKeys | None,
    ) -> None:
        ledger, run_log = open_ledger(settings)
        self._authenticator = Authenticator(self._zmq, KeyDirectory(settings.hub.keys)) if settings.hub.keys else None
        self._actor_socket = hub_router(
            self._zmq, max_message_bytes=settings.limits.max_message_bytes, receive_hwm=UNREAD_PER_ACTOR
        )
        if self._authenticator is not None:
            self._authenticator.protect(self._actor_socket)
        self._peers = PeerLimit(self._actor_socket)
        self._listen(settings.bind, settings.hub.bind)
        self.endpoint = bound_endpoint(self._actor_socket)
        bound = self.endpoint.removeprefix("tcp://").rpartition(":")[0]
        host = in_url(advertised(settings.hub.advertise or bound, "hub.advertise"))
        weights = WeightServer(self._zmq, settings, host, self._authenticator)
        self._rank_authenticator = Authenticator(self._rank_zmq, rank_keys) if rank_keys is not None else None
        self._rank_socket = self._rank_zmq.socket(zmq.ROUTER)
        self._rank_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._rank_authenticator is not None:
            self._rank_authenticator.protect(self._rank_socket)
        allow_ipv6(self._rank_socket, settings.rank_endpoint)
        self._rank_socket.bind(settings.rank_endpoint)
        if rank_keys is not None:  # what these sockets accept will wait as they do
            retry_soon(settings.rank_silent_s)
        counters = Counter(dict.fromkeys(ALWAYS, 0))
        send = Outbound(self._actor_socket, self._rank_socket, counters)
        self.context = HubContext(settings, ledger, run_log, Connections(), weights, send, counters)
        uses_device = device_transports(settings.publish.transports, setting="publish.transports")
        reached = msgspec.structs.replace(settings, rank_endpoint=bound_endpoint(self._rank_socket))
        self.broadcast = BroadcastHandler(self.context, (lambda: start_broadcaster(reached)) if uses_device else None)
        self._actors = ActorHandler(self.context, self.broadcast)
        self._ranks = RankHandler(
            self.context, self.broadcast, lambda message: self._stop(message.reason, finished=message.finished)
        )
        self._stopped = self._finished = False
        self._alone_since: float | None = None
        self._warn_at = 0.0
        connect = f"tcp://{host}:{self.endpoint.rpartition(':')[2]}" if is_wildcard(self.endpoint) else self.endpoint
        self._control = ControlServer(self._zmq, ControlHandler(self.context).answer)
        ranks = bound_endpoint(self._rank_socket)
        write_hub_json(settings, connect, weights.endpoint, ranks, self._control.endpoint)

    def _listen(self, address: str, asked: str) -> None:
        """Bind to the predecessor's address, or as `hub.bind` asks where another process has that port by now."""
        try:
            bind(self._actor_socket, address, "hub.bind")
        except ConfigError:
            if address == asked:
                raise
            bind(self._actor_socket, asked, "hub.bind")
            log.warning("%s, the run's address so far, cannot be had again (another process took it?): actors that "
                        "streamrl launch did not start must be started again, with connect=%s", address,
                        bound_endpoint(self._actor_socket))

    def run(self, parent_gone: Callable[[], bool]) -> None:
        """Serve until the learner's `Shutdown`, or until its process is gone without one."""
        poller = zmq.Poller()
        poller.register(self._actor_socket, zmq.POLLIN)
        poller.register(self._rank_socket, zmq.POLLIN)
        poller.register(self._peers.monitor, zmq.POLLIN)
        self.context.weights.socket.start()
        next_tick = next_second = 0.0
        while not self._stopped:
            if parent_gone():
                self._learner_gone()
                break
            ready = dict(poller.poll(POLL_MS))
            now = self.context.clock()
            tick = now >= next_tick
            if tick or (self._peers.monitor in ready and self._peers.watch(now)):
                self._peers.tick(now, self.context.connections.by_route)
            if self._actor_socket in ready:
                self._drain_actors(now)
            if self._rank_socket in ready:
                self._drain_ranks(now)
            if tick:
                next_tick = self._tick(now)
            if ready or tick:
                self._ranks.serve(now)
                self._actors.tell_turn(now)
                if not self.context.log.blocked:
                    self._actors.grant(now)
            self.context.log.flush(now)
            self._ranks.logged(now)
            self._actors.flush_acks(now)
            if now >= next_second and not self._stopped:  # the final status must stay
                next_second = now + 1.0
                self._ranks.report(now)
                self._warn_without_actors(now)
                self.context.counters["num_connections_ended"] = (
                    self._peers.num_closed + self.context.weights.socket.peers.num_closed
                )
                write_status(self.context, now)
                self._check_keys(now)
        self._see_off()

    def _see_off(self) -> None:
        """Read on until the actors of a finished run have left, and answer who asks to join by now.

        A connection that is closed with unread messages is reset, and what was on its way to the actor is lost: it
        would look for a hub that has gone.
        """
        until = self.context.clock() + (GOODBYE_S if self._finished else 0.0)
        while True:
            now = self.context.clock()
            self._peers.watch(now)
            self._drain_actors(now)
            if now >= until or not self._peers.any_of(self.context.connections.by_route):
                return
            self._actor_socket.poll(POLL_MS)

    def _tick(self, now: float) -> float:
        """Do what looks at every actor; returns when to do so again."""
        began = time.monotonic()
        self._actors.tick(now)
        self.broadcast.tick(now)
        self._ranks.watch(now)
        self._control.serve()
        took_s = time.monotonic() - began
        return now + max(TICK_S, took_s + took_s / TICK_SHARE)

    def _warn_without_actors(self, now: float) -> None:
        """Warn again and again, for as long as no actor is there."""
        if self.context.weights.manifest is None or len(self.context.connections):
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since, self._warn_at = now, now + NO_ACTOR_S
        elif now >= self._warn_at:
            self._warn_at = now + NO_ACTOR_S
            started = read_object(Path(self.context.settings.run_dir) / LAUNCH_NOTE).get("actors", 0)
            way = f"start one with streamrl actor connect={self.endpoint}"
            if started:
                way = f"{started} started with the run and may still load, see logs/actor-*.log"
            self.context.notify(f"no actor is connected, for {now - self._alone_since:.0f} s: {way}")

    def _learner_gone(self) -> None:
        now = self.context.clock()
        self._drain_ranks(now)  # its last words
        finding = self.context.rank_watch.learner_gone(now)
        log.error("%s; actors will reconnect to its successor",
                  finding.cause if finding is not None else "learner exited without a shutdown message")
        if finding is not None:
            self._ranks.end_group(finding)
        self._stop("the learner is gone", finished=False)

    def _drain_actors(self, now: float) -> None:
        """Handle what is queued, but not so much that the other socket starves."""
        known = self.context.connections.by_route
        for _ in range(MAX_DRAINED):
            try:
                first, *frames = self._actor_socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            routing_id, last = first.bytes, frames[-1] if frames else first
            was_known = routing_id in known
            key_name = None if self._authenticator is None else self._authenticator.name_of(last)
            if self.received(routing_id, [frame.bytes for frame in frames], now, key_name) is False:
                self._peers.refuse(last, routing_id)
            elif not was_known:
                self._peers.heard(last, now, routing_id if routing_id in known else None)

    def received(self, routing_id: bytes, frames: list[bytes], now: float, key_name: str | None) -> bool | None:
        """Handle one message of an actor; False ends its connection. `tests.conform` listens here."""
        return self._actors.received(routing_id, frames, now, key_name=key_name)

    def _drain_ranks(self, now: float) -> None:
        for _ in range(MAX_DRAINED):
            try:
                routing_id, *frames = self._rank_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._ranks.received(routing_id, frames, now)

    def _check_keys(self, now: float) -> None:
        """Evict actors whose keys were removed; refused keys are named in the log."""
        if self._authenticator is None:
            return
        self._authenticator.report_refusals(now)
        if self._authenticator.reload():
            self._actors.evict_without_key(self._authenticator.names(), now)

    def _stop(self, reason: str, *, finished: bool) -> None:
        """Stop every actor and end the loop."""
        if self._stopped:
            return
        self._stopped, self._finished = True, finished
        write_status(self.context, self.context.clock(), state="finished" if finished else "stopped")
        self._actors.stop_all(reason, finished=finished)

    def close(self) -> None:
        self.broadcast.close()
        self.context.log.close()
        self._control.close()
        self.context.weights.socket.close()
        self._peers.close()
        self._actor_socket.close(linger=1000)
        self._rank_socket.close(linger=1000)
        if self._authenticator is not None:
            self._authenticator.close()
        self._zmq.term()
        if self._rank_authenticator is not None:
            self._rank_authenticator.close()
        self._rank_zmq.term()


def serve(
    settings: HubSettings, learner_gone: Callable[[], bool], *, rank_keys: RankKeys | None = None,
    ready: Callable[[], object] = lambda: None,
) -> None:
    """Be the hub of a run until its learner says that it ends, or is gone; `ready` is called once it listens."""
    hub = HubServer(settings, rank_keys=rank_keys)
    try:
        ready()
        hub.run(learner_gone)
    finally:
        hub.close()
        if settings.rank_endpoint.startswith("ipc://"):
            socket_file = Path(settings.rank_endpoint.removeprefix("ipc://"))
            socket_file.unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or gone
                socket_file.parent.rmdir()
