"""Connections of a listening socket that have not said who they are: bounded in number and in time.

ZeroMQ accepts whatever connects and has no limit of its own; every connection is a descriptor, and without descriptors
a process can publish, save and log nothing. The socket's monitor tells of each accepted connection by its descriptor,
and a message tells which descriptor it came through. What must go is shut down below ZeroMQ, which sees its end.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import socket
import struct
from collections import OrderedDict
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from streamrl.transport.log_limit import LogLimit

log = logging.getLogger("streamrl.transport")

ENOUGH_DESCRIPTORS = 65_536
RESERVED_DESCRIPTORS = 192
"""For documents, logs, other sockets and processes."""
MAX_REFUSED = 4096
"""Ended connections that are remembered."""
SILENT_S = 30.0
"""A connection without a message for so long, and without a name, is ended; an honest peer comes back by itself."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENT = struct.Struct("=Hi")
_NUMBERS = itertools.count()


def raise_descriptor_limit() -> int:
    """Lift this process's soft limit on descriptors as far as it may, within reason; the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def room_for_connections(num_sockets: int = 2) -> int:
    """Connections that each of so many listening sockets may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = ENOUGH_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, ENOUGH_DESCRIPTORS)
    return max(16, (soft - RESERVED_DESCRIPTORS) // num_sockets)


@dataclass(slots=True)
class _Peer:
    address: tuple  # as the kernel gives it: proof that the descriptor is still this connection's
    heard_at: float
    name: bytes | None = None  # its routing id once it has said who it is


class PeerLimit:
    """Watches one ROUTER, from the thread that uses it.

    Args:
        router: bound or about to be; peers that connect before this are not seen.
        room: connections at once; half of them may be without a name.
    Attributes:
        monitor: readable when there is something for `watch`.
        num_closed: connections that were ended.
    """

    def __init__(self, router: zmq.Socket, *, room: int | None = None, silent_s: float = SILENT_S) -> None:
        self._router, self._room, self._silent_s = router, room or room_for_connections(), silent_s
        address = f"inproc://peers-{next(_NUMBERS)}"
        router.monitor(address, _EVENTS)
        self.monitor = router.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # or the thread of the sockets would wait for us
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.connect(address)
        self._peers: dict[int, _Peer] = {}
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._num_new = 0
        self._limited_log = LogLimit(log, burst=1, interval_s=10.0)
        self.num_closed = 0

    def watch(self, now: float) -> bool:
        """Take in what the monitor tells; True if so much is new that `tick` should not wait."""
        while self.monitor.poll(0):
            event, descriptor = _EVENT.unpack(self.monitor.recv_multipart()[0])
            if event != zmq.EVENT_ACCEPTED:
                self._peers.pop(descriptor, None)
            elif (address := _address_of(descriptor)) is not None:
                self._peers[descriptor] = _Peer(address, now)
                self._num_new += 1
        return self._num_new > self._room // 8

    def heard(self, frame: zmq.Frame, now: float, name: bytes | None = None) -> None:
        """A message of a peer; `name` is its routing id if it has said by now who it is."""
        descriptor = _descriptor(frame)
        if descriptor not in self._peers:
            self.watch(now)
        peer = self._peers.get(descriptor)
        if peer is not None:
            peer.heard_at, peer.name = now, name

    def refuse(self, frame: zmq.Frame, route: bytes) -> None:
        """End the connection that this came through; `route` is the routing id that it has in the router.

        Had it ended by itself, a silent new peer may have its descriptor: that one is ended, and comes back by itself.
        """
        if route in self._refused:
            return  # it has ended: what is still in the queue names a descriptor that may be another peer's by now
        self._refused[route] = None
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        descriptor = _descriptor(frame)
        if descriptor in self._peers:
            self._close(descriptor)

    def tick(self, now: float, named: Container[bytes] | None = None) -> None:
        """End connections without a name that are too many or too silent.

        Args:
            named: routing ids that still count; None believes every name.
        """
        self.watch(now)
        self._num_new, unnamed = 0, []
        for descriptor, peer in self._peers.items():
            if peer.name is not None and named is not None and peer.name not in named:
                peer.name, peer.heard_at = None, now  # evicted, or it has left
            if peer.name is None:
                unnamed.append((peer.heard_at, descriptor))
        allowed = max(0, min(self._room // 2, self._room - (len(self._peers) - len(unnamed))))
        unnamed.sort()
        surplus = max(0, len(unnamed) - allowed)
        ended = [descriptor for place, (heard_at, descriptor) in enumerate(unnamed)
                 if place < surplus or now - heard_at > self._silent_s]
        for descriptor in ended:
            self._close(descriptor)
        if surplus:
            self._limited_log.warning(
                "%d connections that did not say who they are were ended: %d such are allowed, as a process may have "
                "so many descriptors (ulimit -n)", surplus, allowed,
            )

    def close(self) -> None:
        """Close the monitor; call it before the router is closed."""
        self._router.disable_monitor()
        self.monitor.close(linger=0)

    def _close(self, descriptor: int) -> None:
        peer = self._peers.pop(descriptor)
        try:
            with _opened(descriptor) as connection:
                if connection.getpeername() == peer.address:
                    connection.shutdown(socket.SHUT_RDWR)
                    self.num_closed += 1
        except OSError:
            pass  # it has ended by itself


def _descriptor(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1  # not over TCP


def _address_of(descriptor: int) -> tuple | None:
    try:
        with _opened(descriptor) as connection:
            return connection.getpeername()
    except OSError:
        return None


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    """The connection behind it, by a descriptor of its own: the other one may be closed and used again meanwhile."""
    try:
        own = os.dup(descriptor)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        own = descriptor  # all are in use, which is when connections must end
    connection = socket.socket(fileno=own)
    try:
        yield connection
    finally:
        connection.detach()
        if own != descriptor:
            os.close(own)
