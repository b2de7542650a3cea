"""Heartbeats of a learner rank, and the order to end: a thread and a socket beside torch.

A rank that waits inside a collective cannot be interrupted, and the time-out of the process group is long, because an
honest wait may be. So every rank tells the hub twice a second what it does. The hub sees which rank is dead, stopped or
has failed, and orders the others to exit (`learner.hub.liveness.ranks`).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist
import zmq

from learner.ranks.mesh import Ranks
from streamrl.errors import WireError
from streamrl.messages import HUB_TO_RANK, EndGroup, RankBeat
from streamrl.messages.codec import Decoder, encode
from streamrl.processes import host_id
from streamrl.transport.authentication import connect_with
from streamrl.transport.keys import ActorKey
from streamrl.transport.peers import retry_soon
from streamrl.transport.sockets import allow_ipv6

log = logging.getLogger("streamrl.learner")

BEAT_S = 0.5
FINDING_S = 10.0
"""How long a rank that failed waits for the order to end; `learner.rank_silent_s` more if another may be the cause."""
EXIT_GROUP = 14
"""Exit status of a rank that was told to end."""


def _exit(_cause: str) -> None:
    os._exit(EXIT_GROUP)


class RankBeats:
    """Sends the beats of this rank until `close`; in a `with` block also what the block fails with.

    Args:
        key: shown to a hub on another machine.
        on_end: called in the thread when the hub orders the end; it must not return to a training thread that hangs.
    """

    def __init__(
        self, endpoint: str, ranks: Ranks, *, silent_s: float, on_end: Callable[[str], None] = _exit,
        key: ActorKey | None = None,
    ) -> None:
        self._endpoint, self._ranks, self._silent_s, self._on_end = endpoint, ranks, silent_s, on_end
        self._host, self._key = host_id(), key
        self._last: queue.Queue[RankBeat] = queue.Queue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank_beats", daemon=True)
        self._thread.start()

    def failed(self, error: BaseException) -> None:
        """Tell the hub, which ends the group and so this process; returns if this rank has to report by itself.

        A lone process and rank 0 know their own errors best. What came from a collective is likely another rank's.
        """
        in_group = _is_of_group(error)
        if self._ranks.mesh.world == 1 or (self._ranks.rank == 0 and not in_group):
            return
        text = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
        log.warning("rank %d fails in %s: %s", self._ranks.rank, self._ranks.activity.phase.name, text)
        self._last.put(self._beat(failed=text, in_group=in_group))
        self._ended.wait(FINDING_S + (self._silent_s if in_group else 0.0))

    def close(self) -> None:
        """Say that this rank ends as it should."""
        self._last.put(self._beat(closing=True))
        self._thread.join(timeout=5.0)

    def __enter__(self) -> RankBeats:
        return self

    def __exit__(self, _kind: type | None, error: BaseException | None, _where: TracebackType | None) -> None:
        if error is not None:
            self.failed(error)
        self.close()

    def _beat(self, *, closing: bool = False, failed: str = "", in_group: bool = False) -> RankBeat:
        now, activity, ranks = time.monotonic(), self._ranks.activity, self._ranks
        phase, collective = activity.phase, activity.collective
        return RankBeat(
            ranks.rank, ranks.mesh.world, os.getpid(), self._host, phase.name[:32], now - phase.since,
            collective.name, now - collective.since if collective.name else 0.0, activity.num_collectives,
            closing, failed, in_group,
        )

    def _run(self) -> None:
        context, decoder = zmq.Context(), Decoder(HUB_TO_RANK, max_bytes=1 << 20)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 100)
        dealer.setsockopt(zmq.SNDHWM, 16)  # a hub that reads nothing must not fill this process's memory
        if self._key is not None:
            connect_with(dealer, self._key)
        allow_ipv6(dealer, self._endpoint)
        dealer.connect(self._endpoint)
        closing = False
        while not closing:
            beat = self._next()
            if self._key is not None:  # ranks on several machines, perhaps with new connections
                retry_soon(self._silent_s)
            closing = beat.closing
            try:
                dealer.send(encode(beat), zmq.NOBLOCK)
            except zmq.Again:
                log.debug("the hub takes no beat")
            while dealer.poll(0):
                self._read(decoder, dealer.recv())
        dealer.close()
        context.term()

    def _read(self, decoder: Decoder, frame: bytes) -> None:
        try:
            message = decoder.decode(frame)
        except WireError as error:  # this thread must go on, or the rank is taken for dead
            log.warning("a message of the hub cannot be read: %s", error)
            return
        if isinstance(message, EndGroup):
            self._ended.set()
            self._on_end(message.cause)

    def _next(self) -> RankBeat:
        try:
            return self._last.get(timeout=BEAT_S)
        except queue.Empty:
            return self._beat()


def _is_of_group(error: BaseException) -> bool:
    """Whether the process group raised it: a peer is gone, or did not come in time."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "nccl", "processgroup", "connection closed by peer", "connection reset by peer")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
