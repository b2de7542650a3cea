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
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import zmq

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
                "%d unidentified connections were closed: at most %d are allowed, because of the limit on this "
                "process's open files (ulimit -n)", surplus, allowed,
            )

    def any_of(self, named: Container[bytes]) -> bool:
        """Return whether a connection of one of these routing ids is open."""
        return any(peer.name in named for peer in self._peers.values() if peer.name is not None)

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


MAX_CHARS = 500


class LogLimit:
    """At most `burst` lines at once, and one more every `interval_s`; the next line says how many were left out."""

    def __init__(
        self, log: logging.Logger, *, burst: int = 10, interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._burst, self._interval_s, self._clock = log, burst, interval_s, clock
        self._left, self._at = float(burst), clock()
        self._num_left_out = 0

    def error(self, text: str, *args: object) -> None:
        """Log as `Logger.error` does, within the same limit."""
        self._write(logging.ERROR, text, args)

    def warning(self, text: str, *args: object) -> None:
        """Log as `Logger.warning` does, but not too often, and cut to `MAX_CHARS`."""
        self._write(logging.WARNING, text, args)

    def info(self, text: str, *args: object) -> None:
        """Log as `Logger.info` does, within the same limit."""
        self._write(logging.INFO, text, args)

    def _write(self, level: int, text: str, args: tuple[object, ...]) -> None:
        if not self._log.isEnabledFor(level):
            return
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) / self._interval_s)
        self._at = now
        if self._left < 1.0:
            self._num_left_out += 1
            return
        self._left -= 1.0
        line = (text % args if args else text)[:MAX_CHARS]
        left_out = f" (and {self._num_left_out} more such lines before it)" if self._num_left_out else ""
        self._num_left_out = 0
        self._log.log(level, "%s%s", line, left_out)


RTO_MAX_MS = 44
"""TCP_RTO_MAX_MS of Linux 6.15, which Python has no name for yet; 1,000 to 120,000."""
NUM_ATTEMPTS = 10
"""TCP ends a connection after 15 failed attempts, of which the first are closer together, and with a bound on the wait
it does so whatever TCP_USER_TIMEOUT says (Linux 6.18: after 14.8 s with 1 s, not within 30 s with 3 s)."""


def retry_soon(lasting_s: float) -> int:
    """Let every TCP socket of this process, those of libraries too, try at each tenth of a cut's longest time.

    TCP waits twice as long before each further attempt: after 30 s without a network the next one may be 20 s away.
    Sockets of ZeroMQ can connect again, those of a process group cannot. Linux 6.15 lets a socket bound that wait.
    What a listening socket accepts later inherits it. Returns how many sockets were changed: 0 on an older Linux.
    With 0 silence is not watched: then connections last as long as the system lets them.
    """
    if not lasting_s:
        return 0
    wait_ms = min(max(1_000, int(1000 * lasting_s / NUM_ATTEMPTS)), 120_000)
    names = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    return sum(_retry_soon(int(name), wait_ms) for name in names)


def _retry_soon(descriptor: int, wait_ms: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        copy = os.dup(descriptor)  # its owner may close it at any time
    except OSError:
        return False
    try:
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    with one, suppress(OSError):  # a kernel that does not know the option
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        if is_tcp and one.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS) > wait_ms:
            one.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, wait_ms)
            return True
    return False
