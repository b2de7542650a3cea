"""The hub process: sockets around the ledger, and nothing that decides.

    actors --HELLO, GROUP, HEARTBEAT, INSTALLED--> ROUTER "control" --> Ledger --WELCOME, LEASE, ACK, ANNOUNCE--> actors
    ranks  --TAKE, TRAINED, FREEZE, PUBLISH------> ROUTER "ranks" ----> Ledger --BATCH, STATE-------------------> ranks
    actors --PULL--------------------------------> ROUTER "weights" (a thread of its own: bulk must not delay a beat)

One thread, one poll loop. What wakes whom: a rank that TAKEs waits until `Ledger.cut_batch` has B groups; that becomes
possible when a GROUP is accepted; that needs a lease, which `Ledger.grant` gives when capacity (a finished step), an
installed version (INSTALLED) and a free slot (GROUP or HEARTBEAT) meet. So after every event the loop tries to grant
and to cut. Sends never block: a full or vanished peer is dropped and comes back with HELLO.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import zmq

from learner.hub.broadcaster_process import BroadcasterProcess
from learner.hub.handlers.actors import ActorHandler
from learner.hub.handlers.broadcaster import DEVICE_TRANSPORTS, Broadcaster, BroadcastHandler
from learner.hub.handlers.ranks import RankHandler
from learner.hub.settings import HubSettings
from learner.hub.setup import build_ledger
from learner.hub.status import write_hub_json, write_status
from learner.hub.weight_server import WeightServer
from streamrl.transport.sockets import bind, bound_endpoint, hub_router

log = logging.getLogger("streamrl.hub")

POLL_MS = 20
TICK_S = 0.1


class HubServer:
    """Owns the sockets and the loop; see the drawing above."""

    def __init__(
        self, settings: HubSettings, *, start_sender: Callable[[HubSettings], Broadcaster] = BroadcasterProcess
    ) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self.ledger = build_ledger(settings)
        self._context = zmq.Context()
        hwm = 4096  # messages of one actor that wait unread; its outbox and leases bound them long before
        self._control = hub_router(
            self._context, max_message_bytes=settings.limits.max_message_bytes, receive_hwm=hwm
        )
        bind(self._control, settings.bind, "hub.bind")
        self.endpoint = bound_endpoint(self._control)
        host = settings.advertise or self.endpoint.removeprefix("tcp://").rpartition(":")[0]
        self.weights = WeightServer(self._context, settings, host)
        self._ranks = self._context.socket(zmq.ROUTER)
        self._ranks.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._ranks.setsockopt(zmq.LINGER, 1000)
        self._ranks.bind(settings.rank_endpoint)
        uses_device = set(settings.transports) & set(DEVICE_TRANSPORTS)
        self.devices = BroadcastHandler(self, (lambda: start_sender(settings)) if uses_device else None)
        self.control = ActorHandler(self)
        self.ranks = RankHandler(self)
        self.stopped = False
        write_hub_json(settings, self.endpoint, self.weights.endpoint)

    def run(self, parent_gone: Callable[[], bool]) -> None:
        """Serve until the learner's `Shutdown`, or until the learner is gone without a word."""
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._ranks, zmq.POLLIN)
        self.weights.start()
        next_tick = next_second = 0.0
        while not self.stopped:
            if parent_gone():
                log.error("the learner is gone without a word: actors wait for its successor")
                self.stop("the learner is gone", finished=False)
                break
            ready = dict(poller.poll(POLL_MS))
            now = time.monotonic()
            busy = False
            if self._control in ready:
                busy |= self._drain(self._control, self.control.received, now)
            if self._ranks in ready:
                busy |= self._drain(self._ranks, self.ranks.received, now)
            if now >= next_tick:
                self.control.tick(now)
                self.devices.tick(now)
                next_tick = now + TICK_S
                busy = True
            if busy:
                self.ranks.serve(now)
                self.control.grant(now)
            self.control.flush_acks(now)
            if now >= next_second:
                next_second = now + 1.0
                self.ranks.report(now)
                write_status(self, now)

    def _drain(
        self, socket: zmq.Socket, handle: Callable[[bytes, list[bytes], float], None], now: float
    ) -> bool:
        for _ in range(256):
            try:
                routing_id, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            handle(routing_id, frames, now)
        return True

    def send_control(self, routing_id: bytes, frame: bytes | bytearray) -> bool:
        return self._send(self._control, routing_id, frame)

    def send_rank(self, routing_id: bytes, frame: bytes | bytearray) -> bool:
        return self._send(self._ranks, routing_id, frame)

    def _send(self, socket: zmq.Socket, routing_id: bytes, frame: bytes | bytearray) -> bool:
        try:
            socket.send_multipart([routing_id, frame], zmq.NOBLOCK)
            return True
        except zmq.Again:
            self.counters["num_sends_refused"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters["num_sends_unreachable"] += 1
        return False

    def stop(self, reason: str, *, finished: bool) -> None:
        """Tell every actor, flush, end the loop."""
        if self.stopped:
            return
        self.stopped = True
        write_status(self, time.monotonic(), state="finished" if finished else "stopped")
        self.control.stop_all(reason, finished=finished)

    def close(self) -> None:
        self.devices.close()
        self.weights.close()
        self._control.close(linger=1000)
        self._ranks.close(linger=1000)
        self._context.term()
