"""Baselines of the hub: a DEALER/ROUTER loop that only decodes and acknowledges, and a PUSH/PULL pipe.

The loop has the same frames, the same window and the same batched acknowledgements, and no ledger: nothing is checked,
deduplicated, leased or trained. The pipe shows what a transport without acknowledgements loses when a process dies.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import tempfile
import time
from collections import Counter
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from bench.wire import make_group
from streamrl.messages import TO_HUB
from streamrl.messages.codec import Decoder, encode

ACK_S = 0.02
PIPE_BATCH, PIPE_STEP_S = 2_000, 0.2
_FORK = multiprocessing.get_context("spawn")


def serve_router(endpoint: str, received: Synchronized[int], stop: Event, decode: bool) -> None:
    """The other end of the loop."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVHWM, 4096)
    router.setsockopt(zmq.BACKLOG, 4096)
    router.bind(endpoint)
    decoder, owed = Decoder(TO_HUB), Counter[bytes]()
    ack_at = 0.0
    while not stop.is_set():
        if router.poll(20):
            for _ in range(256):
                try:
                    route, frame = router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if decode:
                    decoder.decode(frame)
                owed[route] += 1
        if time.monotonic() - ack_at >= ACK_S:
            ack_at = time.monotonic()
            for route, num in owed.items():
                router.send_multipart([route, num.to_bytes(4, "little")], zmq.NOBLOCK)
            received.value += sum(owed.values())
            owed.clear()
    context.destroy(linger=0)


def bare_loop(num_actors: int, group_size: int, num_tokens: int, window: int, seconds: float, *, decode: bool) -> float:
    """Acknowledged trajectories a second."""
    folder = tempfile.mkdtemp(prefix="bare-")
    endpoint = f"tcp://127.0.0.1:{_free_port()}"
    received, stop = _FORK.Value("q", 0), _FORK.Event()
    server = _FORK.Process(target=serve_router, args=(endpoint, received, stop, decode))
    server.start()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, num_actors + 16)
    frame = bytes(encode(make_group(num_tokens, group_size, 0)))
    epoll, sockets = select.epoll(), {}
    for _ in range(num_actors):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        for _ in range(window):
            dealer.send(frame, copy=False)
        descriptor = dealer.getsockopt(zmq.FD)
        sockets[descriptor] = dealer
        epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        _answer_one(dealer, frame)  # only after a read that found nothing does the descriptor tell of the next message
    try:
        while received.value < num_actors * window:
            _answer(epoll, sockets, frame)
        began, first = time.monotonic(), received.value
        while time.monotonic() - began < seconds:
            _answer(epoll, sockets, frame)
        return (received.value - first) * group_size / (time.monotonic() - began)
    finally:
        stop.set()
        server.join()
        context.destroy(linger=0)
        os.rmdir(folder)


def _answer(epoll: Any, sockets: dict[int, zmq.Socket], frame: bytes) -> None:
    for descriptor, _ in epoll.poll(0.02, 1024):
        _answer_one(sockets[descriptor], frame)


def _answer_one(dealer: zmq.Socket, frame: bytes) -> None:
    while True:
        try:
            num = int.from_bytes(dealer.recv(zmq.NOBLOCK), "little")
        except zmq.Again:
            return
        for _ in range(num):
            dealer.send(frame, copy=True)  # an actor encodes each group: so it is copied here


def pull(endpoint: str, path: Path) -> None:
    """The far end of the pipe: notes the number of every message that it has read, and trains after each batch."""
    socket = zmq.Context().socket(zmq.PULL)
    socket.bind(endpoint)
    with open(path, "ab", buffering=0) as file:
        while True:
            for _ in range(PIPE_BATCH):
                file.write(socket.recv()[:8])
            time.sleep(PIPE_STEP_S)


class Pipe:
    """Senders with the limits that ZeroMQ has by itself, and a reader that can be killed."""

    def __init__(self, folder: Path, num_senders: int) -> None:
        self._endpoint, self.path = f"tcp://127.0.0.1:{_free_port()}", folder / "read"
        self.path.touch()
        self.context = zmq.Context()
        self._senders = [self.context.socket(zmq.PUSH) for _ in range(num_senders)]
        self._poller = zmq.Poller()
        for one in self._senders:
            one.connect(self._endpoint)
            self._poller.register(one, zmq.POLLOUT)
        self.start_reader()

    def start_reader(self) -> None:
        self.reader = _FORK.Process(target=pull, args=(self._endpoint, self.path))
        self.reader.start()

    def send(self, first: int, last: int, *, until_full: bool) -> int:
        """Send these numbers, or as many as the pipe takes; returns the first that was not sent."""
        payload = bytes(8192)
        while first < last:
            ready = self._poller.poll(20 if until_full else 10_000)
            if not ready and until_full and self.path.stat().st_size:
                return first
            for sender, _ in ready:
                if first < last:
                    sender.send(first.to_bytes(8, "little") + payload)
                    first += 1
        return first

    def num_read(self) -> int:
        """Different messages that a reader has noted, once nothing more comes."""
        still_at, size = time.monotonic(), -1
        while time.monotonic() - still_at < 2.0:
            if self.path.stat().st_size != size:
                still_at, size = time.monotonic(), self.path.stat().st_size
            time.sleep(0.02)
        return len(set(np.fromfile(self.path, "<u8").tolist()))


def pipe_losses(num_senders: int, num_messages: int, num_kills: int) -> dict[str, float]:
    """Messages sent, read and lost by PUSH/PULL when the reader is killed so often, each time while the pipe is full.

    Full: the reader trains, its queue and the senders' are at their limits, and no sender may send.
    """
    with tempfile.TemporaryDirectory(prefix="pipe-") as folder:
        pipe, sent, kills = Pipe(Path(folder), num_senders), 0, 0
        for _ in range(num_kills):
            sent = pipe.send(sent, num_messages, until_full=True)
            assert sent < num_messages, f"{num_messages} messages did not fill the pipe"
            pipe.reader.kill()
            pipe.reader.join()
            kills += 1
            pipe.start_reader()
        pipe.send(sent, num_messages, until_full=False)
        num_read = pipe.num_read()
        pipe.reader.kill()
        pipe.reader.join()
        pipe.context.destroy(linger=0)
        return {"sent": num_messages, "read": num_read, "lost": num_messages - num_read, "kills": kills}


def _free_port() -> int:
    probe = zmq.Context.instance().socket(zmq.ROUTER)
    port = probe.bind_to_random_port("tcp://127.0.0.1")
    probe.close()
    return port
