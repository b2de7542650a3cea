"""ZeroMQ sockets with the settings that lose nothing silently; each socket belongs to the thread that made it."""

from __future__ import annotations

import os
import tempfile

import zmq

from streamrl.errors import ConfigError, StreamrlError
from streamrl.transport.authentication import connect_with
from streamrl.transport.keys import ActorKey, split_endpoint


def hub_router(context: zmq.Context, *, max_message_bytes: int, receive_hwm: int) -> zmq.Socket:
    """A ROUTER that reports unknown peers (MANDATORY) and never hands one peer's identity to another (HANDOVER off)."""
    socket = _socket(context, zmq.ROUTER, max_message_bytes, receive_hwm, send_hwm=10_000)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    socket.setsockopt(zmq.BACKLOG, 4096)
    return socket


def actor_dealer(
    context: zmq.Context, endpoint: str, *, max_message_bytes: int = 64 << 20, receive_hwm: int = 1000,
    key: ActorKey | None = None,
) -> zmq.Socket:
    """A DEALER that queues only to a live connection (IMMEDIATE) and reconnects with back-off. Raises zmq.ZMQError.

    Args:
        endpoint: tcp://HOST:PORT, or tcp://HOST:PORT#KEY of a relay with a public key of its own.
        key: shown to the other side, which must have the key that `endpoint` or this one expects; None is plain.
    """
    socket = _socket(context, zmq.DEALER, max_message_bytes, receive_hwm, send_hwm=1000)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
    address, server = split_endpoint(endpoint)
    if key is not None:
        connect_with(socket, key, server)
    allow_ipv6(socket, address)
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def _socket(context: zmq.Context, kind: int, max_message_bytes: int, receive_hwm: int, *, send_hwm: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, send_hwm)
    socket.setsockopt(zmq.RCVHWM, receive_hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)  # before bind, or it is ignored
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return socket


def allow_ipv6(socket: zmq.Socket, address: str) -> None:
    """Before the bind to, or the connection with, tcp://[ADDRESS]:PORT; elsewhere it changes what names stand for."""
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)


def bound_endpoint(socket: zmq.Socket) -> str:
    """The endpoint that a bind to port 0 took."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def bind(socket: zmq.Socket, address: str, setting: str) -> None:
    """Bind, or raise ConfigError naming the `setting` that the address came from and the remedy."""
    allow_ipv6(socket, address)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"{setting}: {address} is in use by another process; stop that, or choose another port (0: any free)"
            ) from error
        raise ConfigError(f"{setting}: cannot bind {address}: {error}; give an address of this machine") from error


MAX_ROOT = 64
"""Characters of a folder for folders of sockets: a path of a socket has at most 107, and vLLM adds 37."""


def socket_root() -> str:
    """The folder for sockets of this machine: that for temporary files, or a shorter one where its path is too long."""
    usual = tempfile.gettempdir()
    for root in (usual, "/tmp", "/var/tmp"):
        if len(os.fsencode(root)) <= MAX_ROOT and os.access(root, os.W_OK | os.X_OK):
            return root
    raise StreamrlError(
        f"the folder for temporary files, {usual}, has over {MAX_ROOT} characters, too many for sockets in it, and in "
        "/tmp none can be made: set TMPDIR to a shorter path"
    )


def socket_folder(prefix: str) -> str:
    """A new folder that only this user may enter, for sockets."""
    return tempfile.mkdtemp(prefix=prefix, dir=socket_root())
